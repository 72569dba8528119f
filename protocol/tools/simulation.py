"""Messages between `tidegate simulate` and the process that simulates.

The tool starts `python -m simulator --config JSON` (a SimulationConfig) and reads one JSON object
per line from it: a `SimulatedMachine`, then a `SimulationResult` for each number of replicas that
was simulated. The last result is the answer. All times are in seconds.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Literal

import msgspec

from protocol.config.base import Config, about
from protocol.config.engine import EngineConfig

DURATION_S = 60.0
"""The default duration of a workload without a trace."""

Workload = Literal["poisson", "bursts", "chat"]


class SimulationConfig(Config, frozen=True, kw_only=True):
    """The workload, the cluster that serves it, and what to look for."""

    engine: Annotated[EngineConfig, about("config of every replica's engine", wiring=True)]

    # ---- the workload

    workload: Annotated[
        Workload,
        about(
            "arrivals; poisson: at random times; bursts: at random times, but only in bursts; "
            "chat: conversations, whose prompts grow with each turn"
        ),
    ] = "poisson"
    trace: Annotated[
        str,
        about(
            "file of arrivals, as JSON lines or CSV, instead of a workload (docs/scale/scale.md "
            "lists the columns; those of the Azure and Mooncake traces are known)"
        ),
    ] = ""
    speed: Annotated[float, about("play a trace this many times as fast", gt=0, le=1e6)] = 1.0
    rate: Annotated[
        float,
        about(
            "requests per second, on average over the whole workload; for a chat, those of all "
            "conversations together, if answers took no time",
            gt=0,
            le=1e7,
        ),
    ] = 1.0
    duration_s: Annotated[
        float,
        about("seconds during which requests arrive; 0: 60, or the whole trace", ge=0, le=1e6),
    ] = 0.0
    input_tokens: Annotated[
        int, about("length of a prompt, without its shared prefix", ge=1, le=1 << 24)
    ] = 512
    output_tokens: Annotated[int, about("length of an answer", ge=1, le=1 << 24)] = 128
    spread: Annotated[
        float,
        about(
            "vary both lengths uniformly by up to this fraction", ge=0, le=0.99, metavar="FRACTION"
        ),
    ] = 0.5
    prefixes: Annotated[
        int, about("number of different shared prefixes, such as system prompts", ge=1, le=1 << 24)
    ] = 1
    prefix_tokens: Annotated[
        int, about("length of a shared prefix; 0: prompts share nothing", ge=0, le=1 << 24)
    ] = 0
    prefix_skew: Annotated[
        float,
        about(
            "how unequal the prefixes are: the n-th is used 1 / n^X times as often as the first",
            ge=0,
            le=4,
        ),
    ] = 1.0
    burst_s: Annotated[float, about("length of a burst in seconds", gt=0, le=1e6)] = 5.0
    pause_s: Annotated[float, about("seconds without arrivals after each burst", ge=0, le=1e6)] = (
        15.0
    )
    turns: Annotated[int, about("turns of a conversation", ge=1, le=10_000)] = 5
    think_s: Annotated[
        float, about("seconds between an answer and the next turn, on average", ge=0, le=1e6)
    ] = 5.0
    seed: Annotated[
        int, about("seed of all random choices; equal seeds give equal results", ge=0, le=1 << 48)
    ] = 1

    # ---- the cluster

    replicas: Annotated[int, about("number of engines", ge=1, le=100_000)] = 1
    tensor_parallel: Annotated[int, about("GPUs of each replica", ge=1, le=64)] = 1
    gateways: Annotated[
        int, about("gateway processes; each has a routing table of its own", ge=1, le=4096)
    ] = 1
    hardware: Annotated[
        str,
        about(
            "GPU of the table (--list), or a TOML file with rows of such a table",
            metavar="GPU|FILE",
        ),
    ] = "H100"
    model: Annotated[
        str, about("model of the table (--list), or the path of a config.json", wiring=True)
    ] = ""
    steps: Annotated[
        str,
        about(
            "file of measured step times, used instead of --hardware: what --measure has written, "
            "or the journal of a server (--journal), or a directory of journals"
        ),
    ] = ""
    gateway_ms: Annotated[
        float,
        about(
            "milliseconds that HTTP, tokenizing and the gateway add to the time to first token",
            ge=0,
            le=1e5,
        ),
    ] = 4.0
    report_ms: Annotated[
        float,
        about(
            "milliseconds between two reports of a replica's load to the gateways: what they know "
            "is at most this old",
            ge=0.1,
            le=60_000,
        ),
    ] = 20.0
    routing: Annotated[
        Literal["prefix", "load", "random"],
        about(
            "choice of a replica. prefix: the gateway's router; load: the same router, without "
            "prefixes; random: any replica"
        ),
    ] = "prefix"
    routing_entries: Annotated[
        int, about("prefixes that a gateway remembers", ge=1, le=1 << 28)
    ] = 1 << 20

    # ---- what to do

    target_ttft_p99: Annotated[
        float,
        about(
            "search the smallest number of replicas whose 99th percentile of the time to first "
            "token is at most this many seconds; 0: simulate --replicas",
            metavar="SECONDS",
            ge=0,
            le=86_400,
        ),
    ] = 0.0
    max_replicas: Annotated[
        int, about("give up a search above this number of replicas", ge=1, le=100_000)
    ] = 1024
    slo_ttft_ms: Annotated[
        float, about("objective for the time to first token; 0: none", ge=0, le=1e9)
    ] = 0.0
    slo_tpot_ms: Annotated[
        float, about("objective for the time per output token; 0: none", ge=0, le=1e9)
    ] = 0.0
    exact: Annotated[
        int,
        about(
            "replicas that run the real engine; the others run a light model of it; a search runs "
            "the light model, and the real engine for its answer",
            ge=0,
            le=100_000,
        ),
    ] = 4
    processes: Annotated[
        int, about("processes that share the work; a chat needs 1", ge=1, le=64)
    ] = 1

    @property
    def end_s(self) -> float:
        """Seconds from the start of the workload after which no request arrives; infinite for a
        whole trace."""
        return self.duration_s or (inf if self.trace else DURATION_S)

    def __post_init__(self) -> None:
        self._make_absolute("trace", "steps")
        if self.trace and self.workload != "poisson":
            raise ValueError("workload cannot be combined with trace")
        if self.processes > 1 and self.workload == "chat":
            raise ValueError("workload 'chat' needs processes 1")
        if self.processes > min(self.gateways, self.replicas):
            raise ValueError(
                f"processes ({self.processes}) exceeds the number of gateways ({self.gateways}) or "
                f"of replicas ({self.replicas})"
            )
        if not self.model and not self.steps:
            raise ValueError("MODEL or steps is needed")


class SimulatedMachine(msgspec.Struct, frozen=True, kw_only=True, tag="machine"):
    """Simulator -> tool, first. The replica that is simulated."""

    #: Where the step times come from, in words.
    steps: str
    max_slots: int
    token_budget: int
    block_tokens: int
    num_blocks: int
    max_len: int
    #: Bytes of K/V per token; 0: unknown.
    token_bytes: int = 0
    #: Bytes of the recurrent state of a request; 0: the model has none. A long prompt saves its
    #: state to a checkpoint after each `state_interval` tokens.
    state_bytes: int = 0
    num_checkpoints: int = 0
    state_interval: int = 0


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of a time. Percentiles are exact to 1 %."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of all requests of a workload."""

    num_requests: int
    num_completed: int
    num_refused: int
    #: How many of `num_refused` the gateways rejected from a cached refusal.
    num_refused_early: int
    num_preemptions: int
    #: From the first arrival to the last end.
    duration_s: float
    #: Tokens in the prompts of the completed requests, and how many of them were cached.
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Quantiles | None
    #: Time per token after the first, per answer.
    tpot: Quantiles | None
    #: Time between two successive tokens of one answer.
    gap: Quantiles | None
    e2e: Quantiles | None
    #: Completed requests within the objectives; None if there are no objectives.
    num_good: int | None


class RoutingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The work of the gateways' routers."""

    #: Reason of the decision -> number of requests.
    num_by_reason: dict[str, int]
    #: Tokens that the routers expected in the caches of the chosen replicas.
    expected_tokens: int
    #: CPU seconds of all decisions, with the hashes of the prompts.
    cpu_s: float
    #: Prefixes in all tables at the end.
    num_entries: int
    #: Open requests of the busiest replica over those of an average one, averaged over the seconds
    #: in which there is at least one request per replica.
    imbalance: float


class SecondFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One second of the workload."""

    second: int
    num_arrived: int
    num_refused: int
    #: Of the requests that arrived in this second; 0: none has a first token.
    ttft_p50: float
    ttft_p99: float
    #: Requests in all queues and in all slots, at the end of the second.
    waiting: int
    running: int


class StateFigures(msgspec.Struct, kw_only=True):
    """The work of the checkpoints of recurrent states, in all replicas."""

    #: Prompt tokens computed although their K/V was cached, because no checkpoint followed them.
    num_uncovered_tokens: int = 0
    #: Cached checkpoints that were lost, by what was lacking: checkpoints, blocks.
    num_evicted: dict[str, int] = {}

    def merge(self, other: StateFigures) -> None:
        """Add the figures of other replicas."""
        self.num_uncovered_tokens += other.num_uncovered_tokens
        for lack, num in other.num_evicted.items():
            self.num_evicted[lack] = self.num_evicted.get(lack, 0) + num


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """Simulator -> tool, once for each number of replicas that was simulated."""

    replicas: int
    gpus: int
    #: How many of the replicas ran the real engine.
    exact: int
    figures: LoadFigures
    #: Of the requests that went to the replicas with the real engine; None: there were none.
    exact_figures: LoadFigures | None
    routing: RoutingFigures
    #: Share of the time in which a replica computed, on average.
    busy: float
    seconds: list[SecondFigures]
    #: Time that the simulation took.
    wall_s: float
    #: None: the model has no recurrent layers.
    states: StateFigures | None = None
    #: Whether the target was met; None: there was no target.
    meets_target: bool | None = None


class SimulationFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Simulator -> tool, last. Nothing can be simulated: `message` says why, in one line."""

    message: str


SimulatorLine = SimulatedMachine | SimulationResult | SimulationFailed
