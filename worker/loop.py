"""Plans in, results out, each in the order of the plans.

A plan that has arrived is launched before the step that is out is waited for: a device that works
by itself always has its next step queued. A step that is done when its launch returns, as on the
CPU, is told at once, before the next plan is touched. The engine knows a step's masks when it has
heard of all steps before, so those are told before masks are waited for.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, Self

from protocol.kv import KVFetch, KVReport
from protocol.steps import FromWorker, Masks, StepPlan, Stop, ToWorker, Trace
from worker.batch.pending_step import PendingStep
from worker.debug.device_idle import DeviceIdle
from worker.debug.tracing import Tracer
from worker.kv.transfer.service import ToExchange
from worker.registry import check_registry
from worker.step import Runner

log = logging.getLogger(__name__)


class EngineLink(Protocol):
    """The other end of the conversation; process.Connection is one."""

    def receive(self) -> ToWorker: ...

    def wait(self, *wakeups: int) -> bool: ...

    def send(self, message: FromWorker) -> None: ...


class KVService(Protocol):
    """K/V that comes and goes beside the steps; worker.kv.transfer.service has it."""

    @property
    def fd(self) -> int: ...

    def take(self, message: ToExchange) -> None: ...

    def report(self) -> KVReport | None: ...


class WorkerLoop:
    """One worker at work, from its first plan until Stop. To be closed by its `with`.

    exchange   is told what concerns it in the order of the messages
    searches   look for per-slot tensors outside the slot table, after steps 1, 2, 4, 8, ...
    """

    def __init__(
        self, runner: Runner, engine: EngineLink, exchange: KVService, *, searches: bool = False
    ) -> None:
        self._runner = runner
        self._engine = engine
        self._exchange = exchange
        self._searches = searches
        self._out: deque[PendingStep] = deque()  # launched and not told, oldest first
        self._lookout = Lookout()
        self._pace = DeviceIdle()
        self._tracer = Tracer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._lookout.close()

    def run(self) -> None:
        """Raises ValueError on what contradicts the slots or the order of messages, RuntimeError
        on what a search finds."""
        while True:
            self._tell_done()
            if (traced := self._tracer.take()) is not None:
                self._engine.send(traced)
            if (report := self._exchange.report()) is not None:
                self._engine.send(report)
            if not self._engine.wait(self._lookout.fd, self._exchange.fd):
                self._lookout.hear()
                continue
            match self._engine.receive():
                case Stop():
                    log.info("stopped; %s", self._pace.told())
                    return
                case Masks(step=step):
                    raise ValueError(f"masks for step {step}, which nobody asked for")
                case Trace() as order:
                    self._tracer.obey(order)
                case StepPlan() as plan:
                    self._launch(plan)
                case message:
                    self._exchange_kv(message)

    def _launch(self, plan: StepPlan) -> None:
        self._tracer.before(plan.step)
        launched = self._runner.launch(plan, self._masks)
        self._out.append(launched)
        if not launched.is_done:
            self._lookout.watch(launched)

    def _masks(self) -> ToWorker:
        """Those of the step that is being launched. K/V changes hands meanwhile."""
        while self._out:
            self._tell()
        while isinstance(message := self._engine.receive(), ToExchange):
            self._exchange_kv(message)
        return message

    def _exchange_kv(self, message: ToExchange) -> None:
        if isinstance(message, KVFetch):
            self._runner.await_content(message.blocks)
        self._exchange.take(message)

    def _tell_done(self) -> None:
        while self._out and self._out[0].is_done:
            self._tell()

    def _tell(self) -> None:
        """The oldest step's result, waited for if it must be."""
        launched = self._out.popleft()
        result = launched.result()
        self._pace.record(launched.started, launched.started + result.compute_s)
        self._engine.send(result)
        self._tracer.after(launched.step)
        if self._searches and self._pace.num_steps.bit_count() == 1:
            check_registry(self._runner)


class Lookout:
    """A thread that waits for steps in the order of their launch. `fd` can be read when one that
    nobody has heard of is done. Where all steps are done at once it is never started."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._watched: SimpleQueue[PendingStep | None] = SimpleQueue()
        self._thread: Thread | None = None

    def watch(self, launched: PendingStep) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="lookout", daemon=True)
            self._thread.start()
        self._watched.put(launched)

    def hear(self) -> None:
        """From now on there is news of what is done from now on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Waits for the steps that are out, unless the device has failed."""
        if self._thread is not None:
            self._watched.put(None)
            self._thread.join()
        os.close(self.fd)

    def _run(self) -> None:
        while (launched := self._watched.get()) is not None:
            try:
                launched.wait()
            finally:
                # Also when the device has failed: the loop then asks for the result, and hears it.
                os.eventfd_write(self.fd, 1)
