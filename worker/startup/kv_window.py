"""Decides whether K/V blocks are freed when the model's window has passed them.

If every layer has a window, a block stores all layers. If only some have one, the layers form two
groups (KVGroups). Other features need the blocks of a whole prefix, so with them all blocks are
kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.config.worker import WorkerConfig
from protocol.engine.kv_window import KVGroups, num_column_blocks
from worker.spec.facts import ModelFacts
from worker.spec.kv_blocks import BlockLayers

MAX_PADDING = 1.25
"""Groups are formed only if a column's blocks are at most this many times as large as its keys and
values. The last block of a column may store fewer layers than it has room for."""
MAX_WINDOW_BLOCKS = 64
"""Most blocks of a column for the layers with a window."""


def kv_window(options: WorkerConfig, models: Sequence[ModelFacts]) -> int | None:
    """Return the model's window, in tokens, if blocks that it has passed are freed. Return None if
    all blocks are kept, or if only some layers have a window (`kv_groups`).

    models   the model, and its draft model if there is one
    """
    return None if reason_to_keep(options) else models[0].window


def kv_groups(options: WorkerConfig, models: Sequence[ModelFacts]) -> KVGroups | None:
    """Return the K/V groups of a model in which only some layers have a window; None if each block
    stores all layers.

    models   the model, and its draft model if there is one
    """
    spec = models[0]
    groups = _possible_groups(spec)
    return groups if groups is None or not reason_against_groups(options, spec) else None


def reason_against_groups(options: WorkerConfig, spec: ModelFacts) -> str:
    """Return the reason why a block of a model stores all layers although some of them have a
    window, as a phrase; "" if there is none."""
    groups, max_len = _possible_groups(spec), options.max_len or spec.context_tokens
    if reason := reason_to_keep(options):
        return reason
    if groups is None:
        return ""
    num_full, needed = spec.layer_windows.count(None), sum(each.width for each in spec.layer_heads)
    stored = num_column_blocks(groups) * BlockLayers.of(spec, by_window=True).width
    if stored > MAX_PADDING * needed or groups.window_blocks > MAX_WINDOW_BLOCKS:
        return f"the layers: {num_full} of {spec.num_kv_layers} have no window"
    if groups.window >= max_len:
        return f"the length of requests: {max_len} tokens at most"
    return ""


def _possible_groups(spec: ModelFacts) -> KVGroups | None:
    """Return the K/V groups of a model if some of its layers have a window and some have none."""
    windows = [window for window in spec.layer_windows if window is not None]
    num_full = spec.num_kv_layers - len(windows)
    if not windows or not num_full:
        return None
    num_entries = BlockLayers.of(spec, by_window=True).num_entries
    return KVGroups(window=max(windows), window_blocks=num_entries - 1)


def reason_to_keep(options: WorkerConfig) -> str:
    """Return the option or feature because of which all blocks are kept; "" if there is none."""
    kept_for = {
        "--draft-model": options.draft_model,
        "--speculation mtp": options.draft_head,
        "--kv-host-gib": options.kv_host_gib,
        "--kv-disk": options.kv_disk,
        "K/V transfer": options.kv_export or options.cluster_key,  # its engine's `transfers_kv`
    }
    return next((name for name, value in kept_for.items() if value), "")
