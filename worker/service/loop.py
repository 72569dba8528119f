"""The worker's loop: receives plans, launches them, and sends results in the order of the plans.

A plan is launched as soon as it arrives, before the loop waits for the step in flight, so a device
with its own queue always has its next step queued. A step that is done when its launch returns, as
on the CPU, is reported before the next plan is touched. The engine can compute a step's masks only
from the results of all earlier steps, so those results are sent before the loop waits for masks.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, Self

from protocol.worker.kv import KVFetch, KVReport
from protocol.worker.ranks import TokenDigest
from protocol.worker.steps import (
    EncodePlan,
    FromWorker,
    Heartbeat,
    Masks,
    StepPlan,
    StepResult,
    Stop,
    ToWorker,
    Trace,
)
from worker.batch.pending_step import PendingStep
from worker.encoders.runner import EncodeRunner, PendingEncode
from worker.kv.transfer.service import KVMessage
from worker.lora.service import AdapterMessage, AdapterService
from worker.step.device_idle import DeviceIdle
from worker.step.runner import Runner
from worker.step.tracing import Tracer
from worker.vision.service import ImageMessage, ImageService

log = logging.getLogger(__name__)

AnyPending = PendingStep | PendingEncode


_BESIDE_STEPS = KVMessage | AdapterMessage | ImageMessage | Heartbeat
"""Messages that may arrive between a plan and its masks."""


class EngineLink(Protocol):
    """Interface of the connection to the engine. worker.process.EngineConnection implements it."""

    def receive(self) -> ToWorker: ...

    def wait(self, *wakeups: int) -> bool: ...

    def send(self, message: FromWorker) -> None: ...


class KVService(Protocol):
    """Interface of the K/V transfers, which run in threads beside the steps.
    worker.kv.transfer.service.KVTransferService implements it."""

    @property
    def fd(self) -> int: ...

    def apply(self, message: KVMessage) -> None: ...

    def report(self) -> KVReport | None: ...


class WorkerLoop:
    """Executes the engine's plans, one after another. Use it as a context manager.

    runner         executes the plans that generate; None: the model only encodes
    kv_transfers   receives the engine's K/V messages, in the order of their arrival; None: the
                   model has no K/V
    encoder        executes the plans that encode; None: the model only generates
    adapters       loads and unloads LoRA adapters; None: the worker has none
    images         encodes images; None: the model reads none
    answers        whether this worker answers the engine. In a group only rank 0 does; the others
                   report digests of their results
    """

    def __init__(
        self,
        runner: Runner | None,
        engine: EngineLink,
        kv_transfers: KVService | None,
        *,
        encoder: EncodeRunner | None = None,
        adapters: AdapterService | None = None,
        images: ImageService | None = None,
        answers: bool = True,
    ) -> None:
        self._runner = runner
        self._encoder = encoder
        self._engine = engine
        self._kv_transfers = kv_transfers
        self._adapters = adapters
        self._images = images
        #: The digest that is reported instead of answers; None for rank 0, which answers.
        self._digest = None if answers else TokenDigest()
        self._inflight: deque[AnyPending] = deque()  # launched and not reported, oldest first
        self._watcher = StepWatcher()
        self._device_idle = DeviceIdle()
        self._tracer = Tracer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._watcher.close()

    def run(self) -> None:
        """Execute plans until Stop arrives. Raises ValueError if a plan contradicts the slots or a
        message is out of order."""
        while True:
            self._send_finished()
            if (traced := self._tracer.pop()) is not None:
                self._send(traced)
            wakeups = [self._watcher.fd]
            if self._kv_transfers is not None:
                if (report := self._kv_transfers.report()) is not None:
                    self._send(report)
                wakeups.append(self._kv_transfers.fd)
            if self._adapters is not None:
                if (loaded := self._adapters.report()) is not None:
                    self._send(loaded)
                    continue  # there may be another one
                wakeups.append(self._adapters.fd)
            if self._images is not None:
                if (encoded := self._images.report()) is not None:
                    self._send(encoded)
                    continue  # there may be another one
                wakeups.append(self._images.fd)
            if not self._engine.wait(*wakeups):
                self._watcher.clear()
                continue
            match self._engine.receive():
                case Stop():
                    log.info("stopped; %s", self._device_idle.summary())
                    return
                case Masks(step=step):
                    raise ValueError(f"unexpected masks for step {step}")
                case Trace() as trace:
                    self._tracer.on_trace(trace)
                case StepPlan() | EncodePlan() as plan:
                    self._launch(plan)
                case message:
                    self._apply(message)

    def _launch(self, plan: StepPlan | EncodePlan) -> None:
        self._tracer.before_step(plan.step)
        pending: AnyPending
        if isinstance(plan, EncodePlan):
            if self._encoder is None:
                raise ValueError(f"step {plan.step}: the model does not encode")
            pending = self._encoder.launch(plan)
        elif self._runner is None:
            raise ValueError(f"step {plan.step}: the model does not generate")
        else:
            pending = self._runner.launch(plan, self._receive_masks)
        self._inflight.append(pending)
        if not pending.is_done:
            self._watcher.watch(pending)

    def _receive_masks(self) -> ToWorker:
        """Return the next message that is about a step, after sending the results of all earlier
        steps. Other messages are applied as they arrive. The caller checks that the message holds
        the masks of the step being launched."""
        while self._inflight:
            self._send_oldest()
        while isinstance(message := self._engine.receive(), _BESIDE_STEPS):
            self._apply(message)
        return message

    def _apply(self, message: ToWorker) -> None:
        """Apply a message that is not about a step."""
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, AdapterMessage) and self._adapters is not None:
            self._adapters.apply(message)
            return
        if isinstance(message, ImageMessage) and self._images is not None:
            self._images.apply(message)
            return
        if not isinstance(message, KVMessage):
            raise ValueError(f"unexpected {type(message).__name__}")
        if self._runner is None or self._kv_transfers is None:
            raise ValueError(f"unexpected {type(message).__name__}: the model has no K/V")
        if isinstance(message, KVFetch):
            self._runner.zero_draft_blocks(message.blocks)
        self._kv_transfers.apply(message)

    def _send(self, message: FromWorker) -> None:
        """Send a message to the engine. A rank other than 0 sends, instead of a step's result, now
        and then a digest of its tokens."""
        if self._digest is None:
            self._engine.send(message)
        elif isinstance(message, StepResult) and (digest := self._digest.add(message)) is not None:
            self._engine.send(digest)

    def _send_finished(self) -> None:
        while self._inflight and self._inflight[0].is_done:
            self._send_oldest()

    def _send_oldest(self) -> None:
        """Send the oldest step's result, after waiting for it if necessary."""
        pending = self._inflight.popleft()
        result = pending.result()
        self._device_idle.record(pending.started, pending.started + result.compute_s)
        self._send(result)
        self._tracer.after_step(pending.step)


class StepWatcher:
    """Thread that waits for launched steps in their order, and makes `fd` readable after each.

    The thread starts with the first step that is not done when its launch returns. On the CPU there
    is no such step, so the thread never starts.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._watched: SimpleQueue[AnyPending | None] = SimpleQueue()
        self._thread: Thread | None = None

    def watch(self, pending: AnyPending) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="step watcher", daemon=True)
            self._thread.start()
        self._watched.put(pending)

    def clear(self) -> None:
        """Make `fd` unreadable until another step is done."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Stop the thread and close `fd`. The thread first waits for the steps in flight, unless
        the device has failed."""
        if self._thread is not None:
            self._watched.put(None)
            self._thread.join()
        os.close(self.fd)

    def _run(self) -> None:
        while (pending := self._watched.get()) is not None:
            try:
                pending.wait()
            finally:
                # If the device has failed, the loop gets the error when it reads the result.
                os.eventfd_write(self.fd, 1)
