"""A step that is on its way: queued on the device, its results to be read when they are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Self

import numpy as np
from torch import Tensor

from protocol.arrays import Int32
from protocol.steps import StepResult
from worker.batch.readback import Readback
from worker.sampling.logprob_columns import LogprobColumns, int32


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the P rows that sample said, T tokens in all: tokens [T] int64; finite [P] bool, False
    where the logits of a row's last token were not; counts [P] int64, or None: one each."""

    tokens: Tensor
    finite: Tensor
    counts: Tensor | None
    logprobs: LogprobColumns | None

    def moved(self, copy: Callable[[Tensor], Tensor]) -> SampledTokens:
        """The same, each tensor as `copy` gives it."""
        return SampledTokens(
            copy(self.tokens),
            copy(self.finite),
            None if self.counts is None else copy(self.counts),
            None if self.logprobs is None else self.logprobs.moved(copy),
        )


@dataclass(frozen=True, slots=True)
class PendingStep:
    """The step's results in host memory, readable when `readback` says so.

    started    when its launch began (perf_counter)
    said       None where nothing was sampled
    proposed   what the draft model guessed, int64; None where it was not asked
    """

    step: int
    started: float
    readback: Readback
    said: SampledTokens | None
    prompt_logprobs: LogprobColumns | None
    proposed: Tensor | None

    @classmethod
    def of(
        cls,
        step: int,
        started: float,
        readback: Readback,
        said: SampledTokens | None,
        prompt_logprobs: LogprobColumns | None,
        proposed: Tensor | None = None,
    ) -> Self:
        """Queue the copies of all that a step tells, and seal it."""
        copy = readback.copy
        launched = cls(
            step,
            started,
            readback,
            None if said is None else said.moved(copy),
            None if prompt_logprobs is None else prompt_logprobs.moved(copy),
            None if proposed is None else copy(proposed),
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
        said, of_prompt = self.said, self.prompt_logprobs
        counts = None if said is None else said.counts
        of_sampled = None if said is None else said.logprobs
        return StepResult(
            step=self.step,
            tokens=Int32(b"") if said is None else int32(said.tokens.numpy()),
            failed=Int32(b"") if said is None else _failed(said.finite),
            counts=None if counts is None else int32(counts.numpy()),
            logprobs=None if of_sampled is None else of_sampled.told(),
            prompt_logprobs=None if of_prompt is None else of_prompt.told(),
            proposed=None if self.proposed is None else int32(self.proposed.numpy()),
            compute_s=computed_s,
        )


def _failed(finite: Tensor) -> Int32:
    return int32(np.flatnonzero(~finite.numpy()))
