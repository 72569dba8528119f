"""What is measured of a worker's steps, and what was found: between a tool and the worker's room.

The tool starts `python -m worker.debug.benchmark --config JSON` (a StepBench) and reads one JSON
object a line from it: a `StepBenchReady`, then a `StepTiming` for each step asked for, in their
order.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from protocol.config.base import Config, about
from protocol.config.worker import WorkerConfig

PARTS = ("linears", "attention", "head", "sampling", "other layers", "overhead")
"""Of a step, in the order in which they are shown. The step is their sum.

linears       the matrix products of the layers
attention     reading the cache, and writing this step's keys and values to it
head          the final norm and the logits
sampling      from logits to tokens that can be told
other layers  of the forward pass, all the rest: norms, rotation, activations, embeddings
overhead      before the forward pass: the plan, slots, this step's tensors
"""


class StepBench(Config, frozen=True, kw_only=True):
    """Which steps are timed: every batch size with every context length."""

    worker: Annotated[WorkerConfig, about("the worker that is measured", wiring=True)]
    batch: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=4096)], ...],
        about("requests in the step, each with one token (--new-tokens: with so many)"),
    ] = (1, 8, 32)
    context: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 24)], ...],
        about("tokens of each request that are in the cache already"),
    ] = (128, 1024)
    new_tokens: Annotated[
        int, about("tokens computed per request: 1 is decoding, more is a prompt", ge=1, le=1 << 16)
    ] = 1
    steps: Annotated[int, about("timed steps of each kind", ge=1, le=1 << 16)] = 20
    warm_up: Annotated[int, about("steps of each kind before them", ge=0, le=1 << 16)] = 3
    sampling: Annotated[
        Literal["greedy", "nucleus"],
        about("how tokens are chosen; nucleus: temperature 1, top_p 0.9"),
    ] = "greedy"

    def __post_init__(self) -> None:
        if not self.batch or not self.context:
            raise ValueError("batch and context take at least one number each")


class StepBenchReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """What is about to be measured; `phases`: seconds of the start."""

    model: str
    dtype: str
    device: str
    threads: int
    phases: list[tuple[str, float]]


class StepTiming(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One kind of step. Times are of whole steps, as nobody watched them.

    step_s     the median;  best_s, p90_s  the fastest, and what one in ten is slower than
    watched_s  the median of further steps whose parts were timed: the difference is what that cost
    parts_s    of these, the mean of each of PARTS
    """

    batch: int
    context: int
    new_tokens: int
    steps: int
    step_s: float
    best_s: float
    p90_s: float
    watched_s: float
    parts_s: dict[str, float]


StepBenchLine = StepBenchReady | StepTiming
