"""The engine's config: token budgets, drafting, K/V transfer, queue limits and timeouts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from protocol.config.base import Config, LogFormat, OnFailure, SharedKey, about
from protocol.config.worker import TOKEN_BUDGET, WorkerConfig
from protocol.worker.steps import MAX_HEAD_LAG


class EngineConfig(Config, frozen=True, kw_only=True):
    """The process that schedules requests and manages the KV cache."""

    worker: Annotated[WorkerConfig, about("config of this engine's workers", wiring=True)]
    address: Annotated[
        str, about("address where clients connect to this engine (ZeroMQ)", wiring=True)
    ] = ""
    log_format: LogFormat = "text"
    token_budget: Annotated[
        int,
        about(
            f"most tokens computed in one step, over all requests; 0: {TOKEN_BUDGET}",
            ge=0,
            le=1 << 20,
        ),
    ] = 0
    tensor_parallel: Annotated[
        int,
        about(
            "workers (ranks) that compute the model together; each has a share of the weights and "
            "of the KV cache, on a GPU of its own or on a share of the cores",
            alias="--tp",
            ge=1,
            le=64,
        ),
    ] = 1
    workers_elsewhere: Annotated[
        int,
        about(
            "how many of the --tensor-parallel workers other machines start (tidegate worker); the "
            "engine waits for them at --worker-address",
            ge=0,
            le=64,
        ),
    ] = 0
    worker_address: Annotated[
        str,
        about(
            "address for the workers of other machines: tcp://HOST:PORT, with 0.0.0.0 for all "
            "interfaces; rank 0 uses the next port to meet them; needs --cluster-key"
        ),
    ] = ""
    steps_in_flight: Annotated[
        int,
        about("most steps sent to the worker at once; 2: plan the next while one runs", ge=1, le=2),
    ] = 2
    prefix_cache: Annotated[
        bool, about("reuse computed blocks for prompts that start with the same tokens")
    ] = True
    state_interval: Annotated[
        int,
        about(
            "for a model with recurrent layers: tokens of a long prompt between two checkpoints of "
            "its state, at which other prompts can resume; a multiple of --block-tokens",
            ge=1,
            le=1 << 24,
        ),
    ] = 2048
    speculation: Annotated[
        Literal["none", "ngram", "model", "mtp"],
        about(
            "speculative decoding; ngram: draft from the request's own text; model: draft with "
            "--draft-model; mtp: draft with the checkpoint's head for multi-token prediction"
        ),
    ] = "none"
    max_drafts: Annotated[
        int, about("most tokens drafted in one step, per request", ge=1, le=64)
    ] = 8
    ngram_min: Annotated[int, about("shortest n-gram to match", ge=1, le=32)] = 2
    ngram_max: Annotated[
        int, about("longest n-gram to match; longer matches are preferred", ge=1, le=64)
    ] = 8
    draft_width: Annotated[
        int,
        about(
            "tokens with which a step takes twice the time of a short step, used to limit drafts; "
            "0: measure it, or 32 if that is not possible",
            ge=0,
            le=1 << 16,
        ),
    ] = 0
    role: Annotated[
        Literal["both", "prefill", "decode"],
        about(
            "prefill: compute prompts for other engines; decode: continue prompts that other "
            "engines computed, and compute all others; both: do both"
        ),
    ] = "both"
    cluster_key: SharedKey = ""
    kv_lease_s: Annotated[
        float,
        about(
            "drop K/V kept for another engine if not renewed for this many seconds", ge=1, le=3600
        ),
    ] = 30.0
    kv_timeout_s: Annotated[
        float, about("give up fetching K/V after this many seconds", ge=0.1, le=3600)
    ] = 10.0
    kv_on_failure: Annotated[
        OnFailure,
        about("if K/V cannot be fetched: recompute the prompt, or end the request with an error"),
    ] = "recompute"
    kv_load_tokens: Annotated[
        int,
        about(
            "load only runs of at least this many tokens from --kv-host-gib and --kv-disk",
            ge=1,
            le=1 << 24,
        ),
    ] = 64
    kv_events: Annotated[
        str,
        about(
            "address where KV events are published over ZeroMQ as vLLM does, for routers that send "
            "a prompt to the server that has cached it (docs/scale/routers.md); ipc://PATH or "
            "tcp://HOST:PORT; the events contain the token ids of prompts and answers; default: no "
            "KV events"
        ),
    ] = ""
    kv_events_namespace: Annotated[
        list[str],
        about(
            "publish the KV events of this namespace of the prefix cache; repeat it for further "
            "namespaces; '' is that of a server without API keys, group:NAME/ that of the keys "
            "with the namespace NAME, and key:NAME/ that of the key NAME without a namespace",
            metavar="NAMESPACE",
        ),
    ] = []
    kv_events_replay: Annotated[
        str, about("address where subscribers request KV events that they have missed")
    ] = ""
    kv_events_topic: Annotated[str, about("topic of the KV events", metavar="TOPIC")] = ""
    kv_events_plain_tcp: Annotated[
        bool,
        about(
            "allow KV events on TCP addresses that other hosts can reach, although they are not "
            "encrypted, and anyone who can connect reads the token ids"
        ),
    ] = False
    max_waiting: Annotated[
        int, about("most requests in the queue; more are refused with 429", ge=1, le=1 << 20)
    ] = 1024
    max_waiting_tokens: Annotated[
        int, about("most prompt tokens in the queue; more are refused with 429", ge=1, le=1 << 30)
    ] = 2_000_000
    priority_s: Annotated[
        float,
        about(
            "limit on the effect of priorities: a request with priority p is queued as if it had "
            "arrived p / (1 + |p|) times this many seconds later; earlier if p is negative",
            ge=0,
            le=86400,
        ),
    ] = 60.0
    grammar_timeout_s: Annotated[
        float,
        about(
            "refuse a grammar that takes longer than this many seconds to compile, or that waits "
            "longer than this for its turn",
            ge=0.1,
            le=600,
        ),
    ] = 10.0
    lease_s: Annotated[
        float, about("drop a client that is silent for this many seconds", ge=0.5, le=3600)
    ] = 60.0
    step_timeout_s: Annotated[
        float,
        about(
            "give up a worker after this many silent seconds in a step, or after ten times the "
            "time that the step should take, if that is longer",
            ge=1,
            le=86400,
        ),
    ] = 300.0
    stopped_timeout_s: Annotated[
        float,
        about("give up a worker that is stopped (SIGSTOP) for this many seconds", ge=0.5, le=86400),
    ] = 4.0
    journal: Annotated[
        str,
        about(
            "directory for a record of the engine's input, for `tidegate replay`; it contains the "
            "token ids of users' prompts; default: no journal",
            path="new directory",
        ),
    ] = ""
    journal_mib: Annotated[
        int,
        about("largest size of one journal file; the newest four files are kept", ge=1, le=1 << 20),
    ] = 256

    image_data_mib: Annotated[
        int,
        about(
            "memory for the pixels of images that open requests need, and of recent ones",
            ge=1,
            le=1 << 20,
        ),
    ] = 512

    def __post_init__(self) -> None:
        if self.journal and self.cluster_key:
            raise ValueError("journal cannot be used in a cluster or with --split")
        self._make_absolute("journal")
        if (self.speculation == "model") != bool(self.worker.draft_model):
            raise ValueError("speculation 'model' and draft_model must be set together")
        if not self.prefix_cache and (self.worker.kv_host_gib or self.worker.kv_disk):
            raise ValueError(
                "kv_host_gib and kv_disk extend the prefix cache and need prefix_cache"
            )
        if bool(self.kv_events) != bool(self.kv_events_namespace):
            raise ValueError("kv_events and kv_events_namespace must be set together")
        if self.kv_events and not self.prefix_cache:
            raise ValueError("kv_events describe the prefix cache and need prefix_cache")
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("kv_events_replay needs kv_events")
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) exceeds ngram_max ({self.ngram_max})")
        if self.state_interval % self.worker.block_tokens:
            raise ValueError(
                f"state_interval ({self.state_interval}) must be a multiple of block_tokens "
                f"({self.worker.block_tokens})"
            )
        self._check_group()
        # The worker reserves memory for the largest step of its engine. It needs the key only to
        # exchange K/V, for which it keeps all blocks of a request (worker/startup/kv_window.py).
        if self.speculation == "mtp" and self.max_drafts > MAX_HEAD_LAG:
            raise ValueError(
                f"max_drafts must be at most {MAX_HEAD_LAG} with speculation 'mtp': the worker "
                "keeps the hidden states of no more positions"
            )
        drafts = 0 if self.speculation == "none" else self.max_drafts
        worker = msgspec.structs.replace(
            self.worker,
            token_budget=self.token_budget,
            max_drafts=drafts,
            draft_head=self.speculation == "mtp",
            cluster_key=self.cluster_key if self.transfers_kv else "",
            world_size=self.tensor_parallel,
            local_size=self.tensor_parallel - self.workers_elsewhere,
        )
        msgspec.structs.force_setattr(self, "worker", worker)

    @property
    def transfers_kv(self) -> bool:
        """Whether the engine may exchange K/V with other engines. A replica, or the engine of a
        group, may have a cluster key without this: for clients and workers on other machines."""
        return self.role != "both" or self.worker.kv_export

    @property
    def is_group(self) -> bool:
        """Whether several workers compute the model, or one on another machine."""
        return self.tensor_parallel > 1 or self.workers_elsewhere > 0

    @property
    def local_workers(self) -> list[WorkerConfig]:
        """Return the configs of the workers that the engine starts: the lowest ranks."""
        return [
            msgspec.structs.replace(self.worker, rank=rank, local_rank=rank)
            for rank in range(self.worker.local_size)
        ]

    @property
    def checked_workers(self) -> list[WorkerConfig]:
        """Return the configs with which to check the model. If the engine starts no worker, this is
        one whose `local_size` is 0, so this machine's memory is not checked."""
        return self.local_workers or [self.worker]

    def _check_group(self) -> None:
        """Raise ValueError if the options of the group contradict each other or others."""
        if self.workers_elsewhere > self.tensor_parallel:
            raise ValueError(
                f"workers_elsewhere ({self.workers_elsewhere}) exceeds tensor_parallel "
                f"({self.tensor_parallel})"
            )
        if bool(self.workers_elsewhere) != bool(self.worker_address):
            raise ValueError("workers_elsewhere and worker_address must be set together")
        if not self.is_group:
            return
        worker = self.worker
        if self.speculation == "mtp":
            raise ValueError("tensor_parallel cannot be combined with speculation 'mtp'")
        if worker.adapter_rows:
            raise ValueError("tensor_parallel cannot be combined with lora and lora_dir")
        if worker.kv_host_gib or worker.kv_disk or worker.kv_export or self.role != "both":
            raise ValueError(
                "tensor_parallel cannot be combined with kv_host_gib, kv_disk or K/V transfer "
                "between engines"
            )
        if worker.device.startswith("cuda:"):
            raise ValueError(
                f"tensor_parallel needs a GPU for each worker, and device {worker.device} is one; "
                "use device cuda"
            )
