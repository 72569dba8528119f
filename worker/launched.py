"""A step that is on its way: queued on the device, its results to be read when they are there."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Self

from torch import Tensor

from protocol.arrays import Int32
from protocol.steps import StepResult
from worker.columns import Columns, int32
from worker.readback import Readback
from worker.sampler import Choice


@dataclass(frozen=True, slots=True)
class Launched:
    """The step's results in host memory, readable when `readback` says so.

    started    when its launch began (perf_counter)
    tokens, finite    [S], as Choice has them; None where nothing was sampled
    """

    step: int
    started: float
    readback: Readback
    tokens: Tensor | None
    finite: Tensor | None
    logprobs: Columns | None
    prompt_logprobs: Columns | None

    @classmethod
    def of(
        cls,
        step: int,
        started: float,
        readback: Readback,
        choice: Choice | None,
        logprobs: Columns | None,
        prompt_logprobs: Columns | None,
    ) -> Self:
        """Queue the copies of all that a step tells, and seal it."""
        copy = readback.copy
        launched = cls(
            step,
            started,
            readback,
            None if choice is None else copy(choice.tokens),
            None if choice is None else copy(choice.finite),
            None if logprobs is None else logprobs.moved(copy),
            None if prompt_logprobs is None else prompt_logprobs.moved(copy),
        )
        readback.seal()
        return launched

    @property
    def is_done(self) -> bool:
        """Whether `result` would not wait."""
        return self.readback.is_done

    def wait(self) -> None:
        """Until it is done; other threads go on."""
        self.readback.wait()

    def result(self) -> StepResult:
        """What the step computed. Waits for it, and for no later one."""
        self.wait()
        computed_s = perf_counter() - self.started
        return StepResult(
            step=self.step,
            tokens=Int32(b"") if self.tokens is None else int32(self.tokens.numpy()),
            failed=Int32(b"") if self.finite is None else _indexes(~self.finite),
            logprobs=None if self.logprobs is None else self.logprobs.told(),
            prompt_logprobs=None if self.prompt_logprobs is None else self.prompt_logprobs.told(),
            compute_s=computed_s,
        )


def _indexes(flags: Tensor) -> Int32:
    return int32(flags.nonzero().flatten().numpy())
