"""Runs a step that encodes: takes an EncodePlan, and returns an EncodeResult.

Launching a step queues all its work on the device without waiting, as in worker/step/runner.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from protocol.engine.encoding import EncodeInputs
from protocol.wire.arrays import Float32
from protocol.worker.steps import EncodePlan, EncodeResult
from worker.device.logprob_columns import int32
from worker.device.readback import Mark, Readback, mark
from worker.device.staging import integers
from worker.encoders.encoder import Encoder
from worker.encoders.pooling import VectorHead
from worker.encoders.ragged import RaggedBatch, ragged_batch


class EncodeModel(Protocol):
    """Interface of a model that computes the results of one encoding step."""

    @property
    def device(self) -> torch.device: ...

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Return the results [N, size] float32 of the inputs, in the sorted order."""
        ...


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """An encoder, and the head that turns its hidden states into vectors or scores. It implements
    EncodeModel.

    vectors   None: the model scores
    """

    encoder: Encoder
    vectors: VectorHead | None

    @property
    def device(self) -> torch.device:
        return self.encoder.device

    def __call__(self, batch: RaggedBatch) -> Tensor:
        hidden = self.encoder(batch)
        if self.vectors is not None:
            return self.vectors(hidden, batch)
        return self.encoder.scores(hidden, batch)


@dataclass(frozen=True, slots=True)
class PendingEncode:
    """A step in flight, whose results are readable after `readback` is done.

    started   time when the launch started (perf_counter)
    vectors   [N, size] float32 in host memory, in the order of the plan
    """

    step: int
    started: float
    readback: Readback
    vectors: Tensor

    @property
    def is_done(self) -> bool:
        """Return whether `result` would return without waiting."""
        return self.readback.is_done

    def wait(self) -> None:
        """Wait until the step is done. Other threads can run meanwhile."""
        self.readback.wait()

    def result(self) -> EncodeResult:
        """Wait for this step, but for no later one, and return its result."""
        self.wait()
        computed_s = perf_counter() - self.started
        found = np.ascontiguousarray(self.vectors.numpy(), dtype=np.float32)
        failed = np.flatnonzero(~np.isfinite(found).all(axis=1))
        return EncodeResult(
            step=self.step,
            vectors=Float32(found, found.shape),
            failed=int32(failed),
            compute_s=computed_s,
        )


class EncodeRunner:
    """Executes the plans that encode. It keeps no state between steps."""

    def __init__(self, model: EncodeModel, mark: Mark = mark) -> None:
        self._model = model
        self._mark = mark

    def encode(self, inputs: EncodeInputs) -> Tensor:
        """Return the results [N, size] float32 of the inputs, on the device."""
        batch = ragged_batch(
            integers(inputs.tokens.data),
            integers(inputs.lengths.data),
            None if inputs.splits is None else integers(inputs.splits.data),
            self._model.device,
        )
        return self._model(batch).index_select(0, batch.restore)

    @torch.inference_mode()
    def launch(self, plan: EncodePlan) -> PendingEncode:
        """Queue the work of the plan on the device."""
        started = perf_counter()
        readback = Readback(self._model.device, self._mark)
        vectors = readback.copy(self.encode(plan.inputs))
        readback.seal()
        return PendingEncode(plan.step, started, readback, vectors)
