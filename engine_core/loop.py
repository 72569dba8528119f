"""The loop that owns the sockets: hear, ask the engine, tell. It contains no decision.

Per turn: every waiting message of every client is taken in (so control never waits behind prompts:
a prompt is only queued), then a result if there is one, then the next plan is sent if the worker is
free. The loop sleeps in poll; it never spins.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time

import zmq
from msgspec.structs import replace

from engine_core.engine import Engine
from engine_core.grammar.service import GrammarService
from engine_core.health import Health
from engine_core.journal.file import Writer
from engine_core.mailbox import Mailbox
from engine_core.profiling import Profiling
from engine_core.startup import engine_for
from engine_core.worker_link import WorkerLink, WorkerLost
from protocol.cluster_key import ClusterKey
from protocol.config.engine import EngineConfig
from protocol.errors import EngineLost, EngineNotReady, ErrorInfo
from protocol.kv import KVReport
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortByLabel,
    Aborted,
    Drain,
    EngineStatus,
    EngineStopped,
    Generate,
    GetStatus,
    Goodbye,
    Hello,
    KeepKV,
    Loading,
    Outputs,
    Ping,
    Pong,
    Profile,
    Refused,
    ReleaseKV,
    ResourcesFreed,
    SessionLost,
    ToEngine,
    Welcome,
)
from protocol.model_card import ModelCard
from protocol.stats import EngineStats, WorkerView
from protocol.steps import StepResult, Traced, WorkerFailed, WorkerReady

log = logging.getLogger(__name__)

TICK_MS = 250
"""Leases and the step's deadline are looked at so often, those of requests when they come."""


class Dismissed(Exception):
    """This process was asked to end at once (SIGQUIT)."""


class EngineLoop:
    """One engine_core process at work.

    wakeup  a file descriptor that becomes readable on a signal
    key     the cluster's, where there is one
    journal where the engine writes down what it is told
    """

    def __init__(
        self,
        config: EngineConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        wakeup: int,
        key: ClusterKey | None = None,
        journal: Writer | None = None,
    ) -> None:
        self._config = config
        self._wakeup = wakeup
        self._epoch = os.urandom(8).hex()
        self._started_at = time.monotonic()
        self._key = key
        self._mail = Mailbox(
            context, config.address, key, lease_s=config.lease_s, on_gone=self._drop
        )
        self._clients = self._mail.clients
        worker_address = config.worker.address or config.address + ".worker"
        self._workers = WorkerLink(context, config.worker, worker_address)
        self._engine: Engine | None = None  # until the worker is ready
        self._model: ModelCard | None = None
        self.drained_by = ""
        # Since when the worker is at the oldest step that is out, and the engine at planning it.
        self._begun_at: float | None = None
        self._num_early = 0  # requests that clients refused themselves
        self._health = Health(config.stopped_timeout_s)
        self._look_at = 0.0
        self._grammars = GrammarService(config.grammar_timeout_s)
        self._profiling = Profiling()
        self._journal = journal

    def run(self) -> None:
        """Run until drained; `drained_by` names the first requester. Raises WorkerLost if the
        worker is lost, and Dismissed after SIGQUIT; all clients are sent the cause."""
        poller = zmq.Poller()
        sources = (self._mail.socket, self._workers.socket, self._workers.death, self._wakeup)
        for source in (*sources, self._grammars.fd):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_done():
                ready = dict(poller.poll(self._patience_ms(time.monotonic())))
                self._turn(ready, time.monotonic())
        except BaseException as error:
            self._say_gone(str(error) or type(error).__name__)
            raise
        finally:
            self._workers.stop()
            self._mail.close()
            self._grammars.close()

    def _turn(self, ready: dict[object, int], now: float) -> None:
        if self._engine is not None:
            self._mail.tell_each(self._engine.tick(now))
        if self._wakeup in ready:
            if signal.SIGQUIT in os.read(self._wakeup, 4096):
                raise Dismissed("the engine was stopped, as another process of its server failed")
            self._drain("by a signal")
        if self._workers.socket in ready:
            self._hear_worker(now)
        if self._workers.death in ready:
            self._hear_worker(now)  # its last words, if any, say more than its exit code
            raise self._workers.lost()
        self._look_at_worker(now)
        if self._mail.socket in ready:
            for client, message in self._mail.receive(now):
                self._hear(client, message, now)
        self._mail.check_clients(now)
        self._compile_grammars(ready, now)
        self._next_step(now)
        if self._engine is not None and self._engine.freed:
            self._say_freed(self._engine)

    def _patience_ms(self, now: float) -> int:
        """How long to sleep, if nothing happens; a deadline is not slept through."""
        if self._engine is None:
            return TICK_MS
        left_s = min(self._engine.next_deadline - now, TICK_MS / 1000)
        return math.ceil(max(left_s, 0.0) * 1000)

    def _is_done(self) -> bool:
        if not self.drained_by or (self._engine is not None and not self._engine.is_idle):
            return False
        self._say_gone("the server was shut down")
        return True

    # ---- clients

    def _hear(self, client: bytes, message: ToEngine, now: float) -> None:
        match message:
            case Hello():
                if client in self._clients:
                    self._drop(client)  # it begins anew: what it had open it has forgotten
                elif self._engine is not None:  # else in the line of all clients, once it is ready
                    log.info("client %s is %s, pid %d", client.hex(), message.name, message.pid)
                self._clients.greet(client, now, message.name)
                self._welcome(client)
            case Generate():
                self._generate(client, message)
            case Profile():
                self._profile(client, message)
            case GetStatus():
                self._mail.tell(client, self._view(message, now))
            case Abort(requests=requests):
                self._profiling.leave(client, requests)
                if self._engine is not None:
                    ends = self._engine.abort(client, requests)
                    if ends:
                        self._mail.tell(client, Outputs(step=0, outputs=ends))
            case AbortByLabel():
                self._abort_named(client, message)
            case KeepKV(handles=handles):
                if self._engine is not None:
                    self._engine.keep_kv(handles)
            case ReleaseKV(handles=handles):
                if self._engine is not None:
                    self._engine.release_kv(handles)
            case Ping() if client not in self._clients:
                # Its connection broke, and this is another; or it was dropped.
                self._mail.tell(client, SessionLost(why="the connection to the engine broke"))
            case Ping(num_early=num_early, read_bytes=read_bytes):
                self._num_early += num_early
                self._clients.on_read(client, read_bytes, now)
                sent_bytes = self._clients.sent_bytes(client)
                pong = Pong(epoch=self._epoch, stats=self._stats(), sent_bytes=sent_bytes)
                self._mail.tell(client, pong)
            case Goodbye():
                self._clients.drop(client)
                self._drop(client)
            case Drain():
                log.info("client %s asks to drain", client.hex())
                self._drain(f"as the client {self._clients.name_of(client)!r} asked")

    def _generate(self, client: bytes, message: Generate) -> None:
        if client not in self._clients or self._engine is None:
            self._mail.tell(client, Refused(request=message.request, error=self._not_yet()))
        elif (reply := self._engine.add(client, message)) is not None:
            self._mail.tell(client, reply)

    def _profile(self, client: bytes, message: Profile) -> None:
        reply: Refused | None
        if client not in self._clients or self._engine is None:
            reply = Refused(request=message.request, error=self._not_yet())
        else:
            reply = self._profiling.ask(client, message)
        if reply is not None:
            self._mail.tell(client, reply)

    def _not_yet(self) -> ErrorInfo:
        """The refusal of what comes before a Welcome. It was meant for an engine that is gone."""
        what = "the model is loading" if self._engine is None else "the engine was restarted"
        return EngineNotReady(f"{what}: try again", retry_after_s=1).info()

    def _say_freed(self, engine: Engine) -> None:
        freed, engine.freed = engine.freed, {}
        for client, requests in freed.items():
            self._mail.tell(client, ResourcesFreed(requests=requests))

    def _abort_named(self, client: bytes, message: AbortByLabel) -> None:
        """Those whose requests end hear it first, so an answer that says so is true."""
        found = dict.fromkeys(message.names, False)
        if self._engine is not None:
            if message.everything:
                found = dict.fromkeys(self._engine.names, False)
            ends, found = self._engine.abort_named(found)
            for owner, outputs in ends.items():
                self._mail.tell(owner, Outputs(step=0, outputs=outputs))
        aborted = [name for name, is_known in found.items() if is_known]
        unknown = [name for name, is_known in found.items() if not is_known]
        self._mail.tell(client, Aborted(request=message.request, aborted=aborted, unknown=unknown))

    def _welcome(self, client: bytes) -> None:
        """Once the model is loaded; those who greet earlier are welcomed then."""
        if self._engine is None:
            self._mail.tell(client, Loading(elapsed_s=time.monotonic() - self._started_at))
        if self._engine is not None and self._model is not None:
            welcome = Welcome(
                protocol=PROTOCOL_VERSION,
                epoch=self._epoch,
                model=self._model,
                limits=self._engine.limits,
            )
            self._mail.tell(client, welcome)

    def _drop(self, client: bytes) -> None:
        self._profiling.leave(client)
        if self._engine is not None:
            self._engine.drop(client)

    def _say_gone(self, why: str) -> None:
        self._mail.tell_everybody(EngineStopped(error=ErrorInfo(code=EngineLost.code, message=why)))

    # ---- grammars

    def _compile_grammars(self, ready: dict[object, int], now: float) -> None:
        if self._engine is None:
            return
        for job in self._engine.take_jobs():
            self._grammars.submit(job, now)
        if self._grammars.fd not in ready and not self._grammars.is_busy:
            return
        for compiled in self._grammars.take(now):
            for client, reply in self._engine.settle(compiled):
                self._mail.tell(client, reply)

    # ---- the worker

    def _hear_worker(self, now: float) -> None:
        message = self._workers.receive()
        match message:
            case StepResult():
                self._commit(message, now)
            case KVReport():
                assert self._engine is not None
                self._mail.tell_each(self._engine.hear(message))
            case Traced():
                if (told := self._profiling.told(message)) is not None:
                    self._mail.tell(*told)
            case WorkerReady():
                self._start(message)
            case WorkerFailed():
                raise WorkerLost(message.message, message.exit_code)

    def _start(self, ready: WorkerReady) -> None:
        self._model = ready.model
        self._engine = engine_for(
            ready, self._config, epoch=self._epoch, key=self._key, journal=self._journal
        )
        if self.drained_by:
            self._engine.drain()
        clients = self._clients.all()
        if clients:
            names = (f"{self._clients.name_of(client)} ({client.hex()})" for client in clients)
            log.info("clients that waited for the model: %s", ", ".join(names))
        for client in clients:
            self._welcome(client)
        self._grammars.start(ready.model)  # now: clients are busy with what Welcome brought them

    def _next_step(self, now: float) -> None:
        engine = self._engine
        if engine is None:
            return
        if (silent_s := self._step_s(now)) > self._config.step_timeout_s:
            raise WorkerLost(f"the worker has been silent for {silent_s:.0f} s")
        # A worker that computes may report late, so it is given the time of a step, too.
        if (owed_s := engine.owed_s(now)) > self._config.kv_timeout_s + self._config.step_timeout_s:
            raise WorkerLost(f"the worker has not reported on a fetch for {owed_s:.0f} s")
        while True:
            plan = engine.plan()
            self._send_orders(engine)
            if plan is None:
                break
            self._send_trace()
            if self._begun_at is None:
                self._begun_at = now
            self._workers.send(plan)
            self._send_masks(engine)
        if not engine.num_in_flight:
            self._begun_at = None
            self._send_trace()

    def _send_trace(self) -> None:
        """Only before a plan, or while none is out: nothing comes between a plan and its masks."""
        if (order := self._profiling.order()) is not None:
            self._workers.send(order)

    def _send_orders(self, engine: Engine) -> None:
        for order in engine.drain_kv_commands():
            self._workers.send(order)

    def _send_masks(self, engine: Engine) -> None:
        """Of the oldest step that is out. They follow its plan, and come before all later plans but
        the one that went out ahead of them."""
        if (masks := engine.masks()) is not None:
            self._workers.send(masks)

    def _step_s(self, now: float) -> float:
        """For how long the oldest step that is out is awaited; 0 where none is."""
        return 0.0 if self._begun_at is None else now - self._begun_at

    def _commit(self, result: StepResult, now: float) -> None:
        assert self._engine is not None
        took_s = self._step_s(now)
        self._begun_at = now  # with the next one, unless there is none to plan
        news = self._engine.commit(result, took_s)
        self._send_masks(self._engine)  # the worker waits for them, if it is that far
        self._send_orders(self._engine)
        self._mail.tell_each(news)

    # ---- the engine's own state

    def _drain(self, by: str) -> None:
        """Everybody hears of it now, not with the next heartbeat, and sends us nothing new."""
        self.drained_by = self.drained_by or by
        if self._engine is not None:
            self._engine.drain()
            self._mail.tell_everybody(Pong(epoch=self._epoch, stats=self._stats()))

    def _view(self, asked: GetStatus, now: float) -> EngineStatus:
        rows = [] if self._engine is None else self._engine.view(asked.most)
        return EngineStatus(
            request=asked.request,
            now_s=now,
            stats=self._stats(),
            num_open=0 if self._engine is None else self._engine.num_open,
            rows=[replace(row, client=self._clients.name_of(owner)) for owner, row in rows],
        )

    def _look_at_worker(self, now: float) -> None:
        """Whoever asks us is told when it gets on no more, or again, and need not ask."""
        if now < self._look_at:
            return
        self._look_at = now + TICK_MS / 1000
        is_news = self._health.look(self._at_work(now), self._workers.is_stopped, now)
        if self._health.is_lost(now):
            raise WorkerLost(self._health.trouble)
        if is_news:
            log.warning("%s", self._health.trouble or "the worker gets on again")
            self._mail.tell_everybody(Pong(epoch=self._epoch, stats=self._stats()))

    def _at_work(self, now: float) -> WorkerView:
        view = WorkerView() if self._engine is None else self._engine.at_work()
        step_s = self._step_s(now)
        trouble = self._health.trouble
        pids = {"engine_pid": os.getpid(), "pid": self._workers.pid}
        return replace(view, **pids, step_s=step_s, trouble=trouble)

    def _stats(self) -> EngineStats:
        own = EngineStats(clients=len(self._clients))
        if self._engine is not None:
            wire_errors = self._mail.num_wire_errors + self._workers.num_strange
            own = self._engine.stats(clients=len(self._clients), wire_errors=wire_errors)
        worker = self._at_work(time.monotonic())
        return replace(own, num_refused_early=self._num_early, worker=worker)
