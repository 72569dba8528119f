"""The groups in which `--help` shows the options of a server: by their purpose, and in each group
the ones that most users need first.

A server's options are fields of several configs, one for each process (`protocol.config`). A user
looks for a purpose, so the help has other groups than the configs. Commands with these options show
only the options of `first` in `--help`, and all of them in `--help all`.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from tools.flags import Flag, OneLineParser, add_to_group, flags_of


class OptionGroup(NamedTuple):
    """A group of the help.

    first   the fields whose options every help shows, separated by blanks
    rest    the others
    """

    title: str
    first: str = ""
    rest: str = ""

    @property
    def fields(self) -> list[str]:
        return [*self.first.split(), *self.rest.split()]


GROUPS = (
    OptionGroup(
        "where to listen",
        "host port address",
        "gateways web allowed_host cors_origin keep_alive_s idle_timeout_s send_timeout_s",
    ),
    OptionGroup(
        "the model",
        "served_name max_len chat_template lora",
        "mmproj lora_dir max_loras max_lora_rank default_sampling default_chat_template_kwargs "
        "trust_request_chat_template tool_format reasoning_format reasoning_fields pooling "
        "image_urls preprocessed_images_mib image_data_mib image_cache_mib render_only",
    ),
    OptionGroup(
        "memory",
        "max_slots kv_memory_gib gpu_memory kv_dtype",
        "kv_blocks block_tokens prefix_cache state_interval kv_host_gib kv_disk kv_disk_gib "
        "kv_load_tokens",
    ),
    OptionGroup(
        "speed",
        "device threads speculation",
        "share_device dtype weights activations kernels attention decode_graphs token_budget "
        "steps_in_flight draft_model max_drafts ngram_min ngram_max draft_width",
    ),
    OptionGroup("API keys", "api_keys insecure_no_auth", "api_key public_metrics"),
    OptionGroup(
        "several models", "models load", "max_loaded idle_unload_s load_timeout_s manage_models"
    ),
    OptionGroup(
        "several engines, GPUs or machines",
        "replicas tensor_parallel",
        "engines engines_file failover_s cluster cpus_per_replica cluster_env cluster_key "
        "workers_elsewhere worker_address",
    ),
    OptionGroup(
        "separate engines for prompts and answers",
        rest="role split prefill decode split_min_tokens kv_address kv_mover kv_lease_s "
        "kv_timeout_s kv_on_failure",
    ),
    OptionGroup(
        "events for routers",
        rest="kv_events kv_events_namespace kv_events_replay kv_events_topic kv_events_plain_tcp",
    ),
    OptionGroup(
        "limits of requests",
        rest="timeout_s queue_timeout_s max_waiting max_waiting_tokens priority_s max_n "
        "max_prompts max_body_mib body_memory_mib grammar_timeout_s resume_s lease_s",
    ),
    OptionGroup(
        "stored responses, files and batches",
        rest="response_store response_store_mib response_store_days file_store file_store_mib "
        "file_max_mib files_per_key file_days batch_max_lines batches_per_key batch_concurrency",
    ),
    OptionGroup(
        "starts, stops and logs",
        "restart log_format",
        "restart_limit start_timeout_s drain_s step_timeout_s stopped_timeout_s log_file_mib "
        "log_requests log_content otlp_traces_endpoint journal journal_mib poison_slots",
    ),
)


def grouped(
    configs: Iterable[type[msgspec.Struct]], without: Collection[str] = ()
) -> Iterator[tuple[str, Sequence[Flag]]]:
    """Yield the title and the options of each group that has options of `configs`.

    without   fields that do not become options
    """
    flags = {flag.field: flag for config in configs for flag in flags_of(config)}
    for field in without:
        flags.pop(field, None)
    for group in GROUPS:
        if found := [flags.pop(field) for field in group.fields if field in flags]:
            yield group.title, found
    if flags:
        yield "others", [*flags.values()]


def add_grouped_flags(
    parser: argparse.ArgumentParser,
    configs: Iterable[type[msgspec.Struct]],
    *,
    without: Collection[str] = (),
    also_first: Collection[str] = (),
) -> None:
    """Add the options of `configs` to `parser`, in the groups of `GROUPS`. `--help` shows the first
    ones of each group.

    without      fields that do not become options
    also_first   further fields that the help of this command shows
    """
    assert isinstance(parser, OneLineParser)
    first = {field for group in GROUPS for field in group.first.split()} | {*also_first}
    for title, flags in grouped(configs, without):
        add_to_group(parser.add_argument_group(title), flags)
        parser.show_rarely({flag.field for flag in flags} - first)
