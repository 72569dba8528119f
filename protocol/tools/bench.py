"""Messages between `tidegate bench step` and the worker process that measures its steps.

The tool starts `python -m worker.benchmark --config JSON` (a StepBench) and reads one JSON
object per line from it: a `StepBenchReady`, then a `StepTiming` for each kind of step, in order.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from protocol.config.base import Config, about
from protocol.config.worker import WorkerConfig

PARTS = ("linears", "attention", "head", "sampling", "other layers", "overhead")
"""Parts of a step, in display order. Their times add up to the time of the step.

linears       the matrix products of the layers
attention     attention itself, and writing the step's keys and values to the KV cache
head          the final norm and the logits
sampling      from logits to sampled tokens on the host
other layers  the rest of the forward pass: norms, activations, embeddings; with torch's kernels
              also the rotation of queries and keys, which otherwise counts as attention
overhead      work before the forward pass: the plan, the slots, and the step's tensors
"""


class StepBench(Config, frozen=True, kw_only=True):
    """The steps to time: every batch size with every context length.

    Raises ValueError if there are none.
    """

    worker: Annotated[WorkerConfig, about("config of the worker to measure", wiring=True)]
    batch: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=4096)], ...],
        about("requests in the step, each with --new-tokens tokens"),
    ] = (1, 8, 32)
    context: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 24)], ...],
        about("tokens of each request that are in the KV cache already"),
    ] = (128, 1024)
    new_tokens: Annotated[
        int, about("tokens computed per request; 1: decode, more: prefill", ge=1, le=1 << 16)
    ] = 1
    steps: Annotated[int, about("timed steps of each kind", ge=1, le=1 << 16)] = 20
    warm_up: Annotated[
        int, about("untimed steps of each kind before the timed ones", ge=0, le=1 << 16)
    ] = 3
    sampling: Annotated[
        Literal["greedy", "nucleus", "penalised"],
        about(
            "sampling method; nucleus: temperature 1, top_p 0.9; penalised: temperature 0.2, "
            "top_p 0.9, frequency_penalty 0.5, presence_penalty 0.5"
        ),
    ] = "greedy"

    def __post_init__(self) -> None:
        if not self.batch or not self.context:
            raise ValueError("batch and context need at least one number each")


class StepBenchReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Worker -> tool, first. The model and the device that are about to be measured."""

    model: str
    dtype: str
    device: str
    threads: int
    phases: list[tuple[str, float]]  #: seconds of each start-up phase


class StepTiming(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Worker -> tool, once for each kind of step. The times of that kind.

    `step_s`, `best_s` and `p90_s` are of steps whose parts were not timed, because timing the parts
    makes a step slower.
    """

    batch: int
    context: int
    new_tokens: int
    steps: int
    step_s: float  #: median
    best_s: float
    p90_s: float
    watched_s: float  #: median of additional steps, whose parts were timed
    parts_s: dict[str, float]  #: mean time of each of PARTS in those additional steps


StepBenchLine = StepBenchReady | StepTiming
