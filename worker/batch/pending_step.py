"""A step in flight: its work is queued on the device, and its results are read once it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from protocol.wire.arrays import Int32
from protocol.worker.steps import StepResult
from worker.device.logprob_columns import LogprobColumns, float32, int32
from worker.device.readback import Readback


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The T tokens sampled by the P rows that sample.

    tokens   [T] int64
    finite   [P] bool; False if the logits of the row's last token were not finite
    counts   [P] int64, tokens of each row; None: one each
    starts   [P] index of each row's first token. `tokens` and `logprobs` then also contain the
             tokens that were sampled after a wrong draft. None: they contain no others
    mu       [P] float32 `StepResult.mirostat_mu`; None: no row uses Mirostat
    """

    tokens: Tensor
    finite: Tensor
    counts: Tensor | None
    logprobs: LogprobColumns | None
    starts: NDArray[np.int64] | None = None
    mu: Tensor | None = None

    def map_tensors(self, copy: Callable[[Tensor], Tensor]) -> SampledTokens:
        """Return a copy in which `copy` is applied to each tensor."""
        return SampledTokens(
            copy(self.tokens),
            copy(self.finite),
            None if self.counts is None else copy(self.counts),
            None if self.logprobs is None else self.logprobs.map_tensors(copy),
            self.starts,
            None if self.mu is None else copy(self.mu),
        )

    def without_wrong(self) -> SampledTokens:
        """Return the result without the tokens that were sampled after a wrong draft. The tensors
        must be in host memory and readable."""
        if self.starts is None or self.counts is None:
            return self
        counts = self.counts.numpy()
        offsets = np.repeat(self.starts - (counts.cumsum() - counts), counts)
        places = offsets + np.arange(len(offsets))
        return SampledTokens(
            self.tokens[places],
            self.finite,
            self.counts,
            None if self.logprobs is None else self.logprobs.at(places),
            mu=self.mu,
        )


@dataclass(frozen=True, slots=True)
class PendingStep:
    """The step's results in host memory, readable after `readback` is done.

    started    time when the launch started (perf_counter)
    sampled    None if nothing was sampled
    proposed   int64 tokens of the draft model; None if the plan did not use it
    """

    step: int
    started: float
    readback: Readback
    sampled: SampledTokens | None
    prompt_logprobs: LogprobColumns | None
    proposed: Tensor | None

    @classmethod
    def start_readback(
        cls,
        step: int,
        started: float,
        readback: Readback,
        sampled: SampledTokens | None,
        prompt_logprobs: LogprobColumns | None,
        proposed: Tensor | None = None,
    ) -> Self:
        """Queue the copies of all results to host memory, and mark the end of the copies
        (`Readback.seal`)."""
        copy = readback.copy
        pending = cls(
            step,
            started,
            readback,
            None if sampled is None else sampled.map_tensors(copy),
            None if prompt_logprobs is None else prompt_logprobs.map_tensors(copy),
            None if proposed is None else copy(proposed),
        )
        readback.seal()
        return pending

    @property
    def is_done(self) -> bool:
        """Return whether `result` would return without waiting."""
        return self.readback.is_done

    def wait(self) -> None:
        """Wait until the step is done. Other threads can run meanwhile."""
        self.readback.wait()

    def result(self) -> StepResult:
        """Wait for this step, but for no later one, and return its result."""
        self.wait()
        computed_s = perf_counter() - self.started
        sampled, prompt_logprobs = self.sampled, self.prompt_logprobs
        if sampled is not None and sampled.starts is not None:
            sampled = sampled.without_wrong()
        counts = None if sampled is None else sampled.counts
        logprobs = None if sampled is None else sampled.logprobs
        mu = None if sampled is None else sampled.mu
        return StepResult(
            step=self.step,
            tokens=Int32(b"") if sampled is None else int32(sampled.tokens.numpy()),
            failed=Int32(b"") if sampled is None else _failed(sampled.finite),
            counts=None if counts is None else int32(counts.numpy()),
            logprobs=None if logprobs is None else logprobs.to_message(),
            prompt_logprobs=None if prompt_logprobs is None else prompt_logprobs.to_message(),
            mirostat_mu=None if mu is None else float32(mu.numpy()),
            proposed=None if self.proposed is None else int32(self.proposed.numpy()),
            compute_s=computed_s,
        )


def _failed(finite: Tensor) -> Int32:
    return int32(np.flatnonzero(~finite.numpy()))
