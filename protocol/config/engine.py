"""What the engine is told: budgets, guessing ahead, K/V that changes hands, and when to give up."""

from __future__ import annotations

from typing import Annotated, Literal

from protocol.config.base import Config, LogFormat, OnFailure, SharedKey, about
from protocol.config.worker import WorkerConfig


class EngineConfig(Config, frozen=True, kw_only=True):
    """The process that decides."""

    worker: Annotated[WorkerConfig, about("the workers of this replica", wiring=True)]
    address: Annotated[str, about("where clients find this engine (ZeroMQ)", wiring=True)] = ""
    log_format: LogFormat = "text"
    token_budget: Annotated[
        int, about("most tokens computed in one step, over all requests", ge=1, le=1 << 20)
    ] = 256
    steps_in_flight: Annotated[
        int,
        about("steps sent to the worker before the first of them has come back", ge=1, le=2),
    ] = 2
    prefix_cache: Annotated[bool, about("reuse computed blocks of equal prompts")] = True
    speculation: Annotated[
        Literal["none", "ngram", "model"],
        about(
            "guess tokens ahead and verify them; ngram: from what the request has said before; "
            "model: by the draft model"
        ),
    ] = "none"
    max_drafts: Annotated[
        int, about("most tokens guessed ahead in one step, per request", ge=1, le=64)
    ] = 8
    ngram_min: Annotated[
        int, about("tokens that must be as they were before, to guess what follows", ge=1, le=32)
    ] = 2
    ngram_max: Annotated[
        int, about("of several such places the one wins where more are, up to so many", ge=1, le=64)
    ] = 8
    draft_width: Annotated[
        int,
        about(
            "tokens with which a step takes about twice as long as with none: few guesses are made "
            "where that many are computed anyway; 0: what a step costs is measured (32 where it "
            "cannot be)",
            ge=0,
            le=1 << 16,
        ),
    ] = 0
    role: Annotated[
        Literal["both", "prefill", "decode"],
        about(
            "prefill: compute prompts for other engines; decode: go on from such prompts, and "
            "compute what nobody else has; both"
        ),
    ] = "both"
    cluster_key: SharedKey = ""
    kv_lease_s: Annotated[
        float, about("K/V that is kept for another engine is given up after so long", ge=1, le=3600)
    ] = 30.0
    kv_timeout_s: Annotated[
        float, about("K/V that takes longer to fetch has failed", ge=0.1, le=3600)
    ] = 10.0
    kv_on_failure: Annotated[
        OnFailure,
        about("what becomes of a request whose K/V cannot be fetched"),
    ] = "recompute"
    kv_load_tokens: Annotated[
        int,
        about(
            "of a prompt that kv-host-gib or kv-disk still has, fewer tokens are computed, and not "
            "loaded",
            ge=1,
            le=1 << 24,
        ),
    ] = 64
    max_waiting: Annotated[
        int, about("requests that may wait; more are refused with 429", ge=1, le=1 << 20)
    ] = 1024
    max_waiting_tokens: Annotated[
        int, about("prompt tokens that may wait; more are refused with 429", ge=1, le=1 << 30)
    ] = 2_000_000
    priority_s: Annotated[
        float,
        about(
            "of two requests that wait, the more important one goes first if it came less than so "
            "much later; the closer their priorities, the less",
            ge=0,
            le=86400,
        ),
    ] = 60.0
    grammar_timeout_s: Annotated[
        float,
        about(
            "a grammar (JSON schema, ...) that takes longer to compile is refused", ge=0.1, le=600
        ),
    ] = 10.0
    lease_s: Annotated[
        float,
        about(
            "a client that is connected but sends nothing for this many seconds is dropped;"
            " one whose connection breaks is dropped at once",
            ge=0.5,
            le=3600,
        ),
    ] = 60.0
    step_timeout_s: Annotated[
        float, about("a worker silent for so long within one step has failed", ge=1, le=86400)
    ] = 300.0
    stopped_timeout_s: Annotated[
        float,
        about("a worker that was stopped by a signal for so long is lost", ge=0.5, le=86400),
    ] = 4.0
    journal: Annotated[
        str,
        about(
            "directory for what `tidegate replay` reads: all that comes to the engine, with token "
            "ids, which are what people wrote. Default: nothing is kept"
        ),
    ] = ""
    journal_mib: Annotated[
        int, about("largest file of a journal; the newest four are kept", ge=1, le=1 << 20)
    ] = 256

    def __post_init__(self) -> None:
        if self.journal and self.cluster_key:
            raise ValueError("journal: an engine of a cluster, or of --split, has none")
        self._make_absolute("journal")
        if (self.speculation == "model") != bool(self.worker.draft_model):
            raise ValueError("speculation 'model' and draft_model need one another")
        if not self.prefix_cache and (self.worker.kv_host_gib or self.worker.kv_disk):
            raise ValueError(
                "kv_host_gib and kv_disk keep what the prefix_cache has found: turn it on"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) is more than ngram_max")
