"""The event loop of the engine process: owns the sockets, calls the engine, sends its replies.

The loop makes no scheduling decision. Each turn commits the worker's result, if there is one, reads
the waiting client messages, and sends the next plan if the worker can take one. Reading a prompt
only queues it, so an Abort never waits for prompts to be computed. Between turns the loop sleeps in
poll.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time

import zmq
from msgspec.structs import replace

from engine_core.connections.event_publisher import EventPublisher
from engine_core.connections.mailbox import Mailbox
from engine_core.engine import Engine
from engine_core.grammar.service import GrammarService
from engine_core.history.queue import TimelineQueue, timelines_answer
from engine_core.journal.file import Writer
from engine_core.profiling import Profiling
from engine_core.result_sender import send_results
from engine_core.saved_adapters import AdapterRestore
from engine_core.startup import build_engine
from engine_core.workers.link import WorkerLink
from engine_core.workers.process import StoppedBySignal
from engine_core.workers.watch import WorkerWatch
from protocol.config.engine import EngineConfig
from protocol.engine.attachments import attached_bytes
from protocol.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortByLabel,
    Aborted,
    Accepted,
    Adapters,
    AttachData,
    Drain,
    Encode,
    EngineStatus,
    EngineStopped,
    Generate,
    GetStatus,
    GetTimeline,
    Goodbye,
    Hello,
    KeepKV,
    LoadAdapter,
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
    UnloadAdapter,
    Welcome,
)
from protocol.engine.model_card import ModelCard
from protocol.engine.stats import EngineStats
from protocol.wire.cluster_key import ClusterKey
from protocol.wire.errors import EngineLost, EngineNotReady, ErrorInfo
from protocol.worker.kv import KVReport
from protocol.worker.steps import (
    AdapterReport,
    EncodeResult,
    ImageEncoded,
    StepResult,
    TokenizerRead,
    Traced,
    WorkerReady,
)

log = logging.getLogger(__name__)

TICK_MS = 250
"""Longest sleep of the loop, in milliseconds, so that leases and the step timeout are checked.

The loop wakes earlier for a request's deadline.
"""
TIMELINES_S = 0.001
"""Most seconds that one turn spends on timelines, which delays the next step by as much."""


class EngineLoop:
    """The event loop of one engine process.

    - wakeup: a file descriptor from which the numbers of received signals can be read
    - worker: the workers, which have been started
    - key: the cluster's key; None if the engine is not part of a cluster
    - journal: records all input of the engine; None for no journal
    - publisher: sends KV events to subscribers; None for no events
    """

    def __init__(
        self,
        config: EngineConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        wakeup: int,
        worker: WorkerLink,
        key: ClusterKey | None = None,
        journal: Writer | None = None,
        publisher: EventPublisher | None = None,
    ) -> None:
        self._config = config
        self._publisher = publisher
        self._wakeup = wakeup
        self._epoch = os.urandom(8).hex()
        self._started_at = time.monotonic()
        self._key = key
        self._mailbox = Mailbox(
            context,
            config.address,
            key,
            lease_s=config.lease_s,
            on_client_lost=self._on_client_lost,
        )
        self._clients = self._mailbox.clients
        self._worker = worker
        self.restore = AdapterRestore.from_config(config, worker.address)
        #: None until the worker is ready.
        self._engine: Engine | None = None
        self._model: ModelCard | None = None
        #: How the drain was requested, for the log; "" until it is requested.
        self.drained_by = ""
        #: Number of requests that gateways rejected from a cached refusal.
        self._num_refused_early = 0
        self._worker_watch = WorkerWatch(config, self._worker)
        self._grammars = GrammarService(config.grammar_timeout_s)
        self._profiling = Profiling()
        self._timelines = TimelineQueue()
        self._journal = journal

    def run(self) -> None:
        """Serve until the engine is drained. `drained_by` then holds the first cause of the drain.

        Raises WorkerLost if the worker is lost, and StoppedBySignal after SIGQUIT. However the loop
        ends, all clients receive an EngineStopped with the cause.
        """
        poller = zmq.Poller()
        sources = (self._mailbox.socket, self._worker.socket, self._worker.death, self._wakeup)
        for source in (*sources, self._grammars.fd):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_done():
                ready = dict(poller.poll(self._poll_timeout_ms(time.monotonic())))
                self._turn(ready, time.monotonic())
        except BaseException as error:
            self._send_stopped(str(error) or type(error).__name__)
            raise
        finally:
            self._worker.stop()
            self._mailbox.close()
            self._grammars.close()

    def _turn(self, ready: dict[object, int], now: float) -> None:
        if self._engine is not None:
            self._mailbox.send_each(self._engine.tick(now))
        if self._wakeup in ready:
            if signal.SIGQUIT in os.read(self._wakeup, 4096):
                raise StoppedBySignal(
                    "the engine was stopped because another process of its server failed"
                )
            self._drain("by a signal")
        if self._worker.socket in ready:
            self._on_worker_message(now)
        if self._worker.death in ready:
            # The worker's last message, if there is one, is more precise than its exit code.
            self._on_worker_message(now)
            raise self._worker.exit_error()
        if self._worker_watch.check_health(self._engine, now):
            self._mailbox.broadcast(Pong(epoch=self._epoch, stats=self._stats()))
        if self._mailbox.socket in ready:
            for client, message in self._mailbox.receive(now):
                self._on_message(client, message, now)
        self._mailbox.check_clients(now)
        self._compile_grammars(ready)
        if self._engine is not None and self._engine.encoding.unsent:
            send_results(self._engine, self._mailbox, self._config.lease_s, now)
        self._next_step(now)
        for client, answer in self._timelines.run(TIMELINES_S, time.monotonic):
            self._mailbox.send(client, answer)
        if self._engine is not None:
            for client, requests in self._engine.pop_freed().items():
                self._mailbox.send(client, ResourcesFreed(requests=requests))
        if self._publisher is not None and self._engine is not None:
            self._publisher.send(self._engine.drain_kv_events(), time.time())

    def _poll_timeout_ms(self, now: float) -> int:
        """Return the longest sleep in poll, in milliseconds.

        It is TICK_MS, or the time until the next deadline of a request if that is shorter, or 0 if
        a client waits for timelines.
        """
        if self._engine is None:
            return TICK_MS
        if self._timelines.is_busy:
            return 0
        left_s = min(self._engine.deadlines.next_at - now, TICK_MS / 1000)
        return math.ceil(max(left_s, 0.0) * 1000)

    def _is_done(self) -> bool:
        if not self.drained_by or (self._engine is not None and not self._engine.is_idle):
            return False
        self._send_stopped("the server was shut down")
        return True

    # ---- clients

    def _on_message(self, client: bytes, message: ToEngine, now: float) -> None:
        match message:
            case Hello():
                if client in self._clients:
                    self._on_client_lost(client)  # a new session: its old requests are abandoned
                elif self._engine is not None:  # else `_start` logs all clients in one line
                    log.info("client %s is %s, pid %d", client.hex(), message.name, message.pid)
                self._clients.add(client, now, message.name, num_welcomes=message.num_welcomes)
                self._welcome(client)
            case AttachData(digest=digest, tensors=tensors):
                if client in self._clients and self._engine is not None:
                    self._engine.attach(digest, tensors, attached_bytes(tensors))
            case Generate() | Encode():
                self._add(client, message)
            case Profile():
                self._profile(client, message)
            case LoadAdapter() | UnloadAdapter():
                self._change_adapters(client, message)
            case GetStatus():
                self._mailbox.send(client, self._status(message, now))
            case GetTimeline():
                self._add_timelines(client, message)
            case Abort(requests=requests, reason=reason):
                self._profiling.cancel(client, requests)
                if self._engine is not None:
                    ends = self._engine.abort(client, requests, reason)
                    if ends:
                        self._mailbox.send(client, Outputs(step=0, outputs=ends))
            case AbortByLabel():
                self._abort_by_label(client, message)
            case KeepKV(handles=handles):
                if self._engine is not None:
                    self._engine.keep_kv(handles)
            case ReleaseKV(handles=handles):
                if self._engine is not None:
                    self._engine.release_kv(handles)
            case Ping() if client not in self._clients:
                # The client reconnected without a Hello, or was dropped.
                self._mailbox.send(client, SessionLost(why="the connection to the engine broke"))
            case Ping(num_early=num_early, read_bytes=read_bytes):
                self._num_refused_early += num_early
                self._clients.on_read(client, read_bytes, now)
                sent_bytes = self._clients.sent_bytes(client)
                pong = Pong(epoch=self._epoch, stats=self._stats(), sent_bytes=sent_bytes)
                self._mailbox.send(client, pong)
            case Goodbye():
                self._clients.remove(client)
                self._on_client_lost(client)
            case Drain():
                log.info("client %s requests a drain", client.hex())
                self._drain(f"at the request of client {self._clients.get_name(client)!r}")

    def _add(self, client: bytes, message: Generate | Encode) -> None:
        reply: Accepted | Refused | None
        if client not in self._clients or self._engine is None:
            reply = Refused(request=message.request, error=self._not_ready_error())
        elif isinstance(message, Encode):
            reply = self._engine.add_encode(client, message)
        else:
            reply = self._engine.add(client, message)
        if reply is not None:
            self._mailbox.send(client, reply)

    def _profile(self, client: bytes, message: Profile) -> None:
        reply: Refused | None
        if client not in self._clients or self._engine is None:
            reply = Refused(request=message.request, error=self._not_ready_error())
        else:
            reply = self._profiling.request(client, message)
        if reply is not None:
            self._mailbox.send(client, reply)

    def _change_adapters(self, client: bytes, message: LoadAdapter | UnloadAdapter) -> None:
        reply: Refused | None
        if client not in self._clients or self._engine is None:
            reply = Refused(request=message.request, error=self._not_ready_error())
        elif isinstance(message, LoadAdapter):
            reply = self._engine.load_adapter(client, message)
        else:
            reply = self._engine.unload_adapter(client, message)
            self._send_adapter_list(self._engine)
        if reply is not None:
            self._mailbox.send(client, reply)

    def _not_ready_error(self) -> ErrorInfo:
        """Return the error for a request sent before Welcome, or to an earlier engine process."""
        cause = "the model is loading" if self._engine is None else "the engine was restarted"
        return EngineNotReady(f"{cause}: try again", retry_after_s=1).info()

    def _abort_by_label(self, client: bytes, message: AbortByLabel) -> None:
        """Abort the requests that `message` names, of any client.

        Their clients are sent the final Outputs before `client` is sent Aborted.
        """
        found = dict.fromkeys(message.names, False)
        if self._engine is not None:
            if message.everything:
                found = dict.fromkeys(self._engine.names, False)
            ends, found = self._engine.abort_by_label(list(found))
            for owner, outputs in ends.items():
                self._mailbox.send(owner, Outputs(step=0, outputs=outputs))
        aborted = [name for name, is_found in found.items() if is_found]
        unknown = [name for name, is_found in found.items() if not is_found]
        answer = Aborted(request=message.request, aborted=aborted, unknown=unknown)
        self._mailbox.send(client, answer)

    def _welcome(self, client: bytes) -> None:
        """Send Loading until the model and the adapters to restore are loaded; then Welcome, unless
        the client has one to read."""
        if self._engine is None or self.restore.is_busy:
            self._mailbox.send(client, Loading(elapsed_s=time.monotonic() - self._started_at))
        elif self._model is not None and not self._clients.has_unread_welcome(client):
            welcome = Welcome(
                protocol=PROTOCOL_VERSION,
                epoch=self._epoch,
                model=self._model,
                limits=self._engine.limits,
                adapters=self._engine.adapters.infos,
            )
            self._mailbox.send(client, welcome)
            self._clients.on_welcomed(client)

    def _on_client_lost(self, client: bytes) -> None:
        self._profiling.cancel(client)
        self._timelines.remove(client)
        if self._engine is not None:
            self._engine.on_client_lost(client)

    def _send_stopped(self, why: str) -> None:
        self._mailbox.broadcast(EngineStopped(error=ErrorInfo(code=EngineLost.code, message=why)))

    # ---- grammars

    def _compile_grammars(self, ready: dict[object, int]) -> None:
        if self._engine is None:
            return
        for job in self._engine.drain_compile_jobs():
            self._grammars.submit(job)
        self._grammars.trim(self._engine.admission.num_dropped_grammar_bytes)
        if self._grammars.fd not in ready and not self._grammars.is_busy:
            return
        for compiled in self._grammars.drain():
            for client, reply in self._engine.on_grammar_compiled(compiled):
                self._mailbox.send(client, reply)

    # ---- the worker

    def _on_worker_message(self, now: float) -> None:
        message = self._worker.receive()
        match message:
            case StepResult() | EncodeResult():
                self._on_step_result(message, now)
            case KVReport():
                assert self._engine is not None
                self._mailbox.send_each(self._engine.on_kv_report(message))
            case ImageEncoded():
                assert self._engine is not None
                self._mailbox.send_each(self._engine.on_image_encoded(message))
            case AdapterReport():
                assert self._engine is not None
                client, answer = self._engine.on_adapter_report(message)
                if self.restore.on_reply(self._engine, client, answer):
                    self._welcome_all_if_restored(self._engine)
                else:
                    self._send_adapter_list(self._engine)  # first: the client may use it at once
                    self._mailbox.send(client, answer)
            case Traced():
                if (reply := self._profiling.on_traced(message)) is not None:
                    self._mailbox.send(*reply)
            case TokenizerRead():
                self._grammars.start(message)
            case WorkerReady():
                self._start(message)

    def _start(self, ready: WorkerReady) -> None:
        self._model = ready.model
        self._engine = build_engine(
            ready, self._config, epoch=self._epoch, key=self._key, journal=self._journal
        )
        if ready.kv_report is not None:
            self._engine.on_kv_report(ready.kv_report)  # no client has asked for anything yet
        if self.drained_by:
            self._engine.drain()
        self.restore.start(self._engine)
        self._welcome_all_if_restored(self._engine)

    def _welcome_all_if_restored(self, engine: Engine) -> None:
        if self.restore.is_busy:
            return
        engine.adapters.has_changed = False  # Welcome contains the list
        self.restore.save(engine.adapters)
        if len(self._clients):
            log.info("clients that waited for the model: %s", self._clients.described)
        self._mailbox.logs_clients = True
        for client in self._clients.all():
            self._welcome(client)

    def _next_step(self, now: float) -> None:
        engine = self._engine
        if engine is None:
            return
        self._worker_watch.check_limits(engine, now)
        for command in engine.adapters.drain_commands():
            self._worker.send(command)
        while True:
            plan = engine.plan()
            self._send_kv_commands(engine)
            for image_command in engine.images.drain_commands():
                self._worker.send(image_command)
            if plan is None:
                break
            self._send_trace_command()
            self._worker_watch.on_sent(now)
            self._worker.send(plan)
            self._send_masks(engine)
        if not engine.num_in_flight:
            self._worker_watch.on_idle()
            self._send_trace_command()

    def _send_trace_command(self) -> None:
        """Send the pending trace command, if there is one.

        Call it only before a plan, or while no plan is in flight. A Trace may not come between a
        plan and its masks.
        """
        if (command := self._profiling.pop_command()) is not None:
            self._worker.send(command)

    def _send_adapter_list(self, engine: Engine) -> None:
        """Send the list of LoRA adapters to all clients if it has changed."""
        if engine.adapters.has_changed:
            engine.adapters.has_changed = False
            self.restore.save(engine.adapters)
            self._mailbox.broadcast(Adapters(adapters=engine.adapters.infos))

    def _send_kv_commands(self, engine: Engine) -> None:
        for command in engine.drain_kv_commands():
            self._worker.send(command)

    def _send_masks(self, engine: Engine) -> None:
        """Send the masks of the oldest step in flight, unless they were sent or are not needed.

        The masks of a plan are sent after the plan, when all earlier plans have committed.
        """
        if (masks := engine.masks()) is not None:
            self._worker.send(masks)

    def _on_step_result(self, result: StepResult | EncodeResult, now: float) -> None:
        assert self._engine is not None
        elapsed_s = self._worker_watch.on_result(now)
        if isinstance(result, EncodeResult):
            outputs = self._engine.commit_encoded(result, elapsed_s)
        else:
            outputs = self._engine.commit(result, elapsed_s)
        self._send_masks(self._engine)  # first: the worker may already be waiting for them
        self._send_kv_commands(self._engine)
        self._mailbox.send_each(outputs)

    # ---- the engine's own state

    def _drain(self, cause: str) -> None:
        """Drain the engine. If the model is loaded, all clients are sent a Pong at once, which
        reports the drain."""
        self.drained_by = self.drained_by or cause
        if self._engine is not None:
            self._engine.drain()
            self._mailbox.broadcast(Pong(epoch=self._epoch, stats=self._stats()))

    def _status(self, message: GetStatus, now: float) -> EngineStatus:
        engine = self._engine
        if engine is None:
            return EngineStatus(request=message.request, now_s=now, stats=self._stats())
        return engine.status(
            message, now=now, stats=self._stats(), client_name=self._clients.get_name
        )

    def _add_timelines(self, client: bytes, message: GetTimeline) -> None:
        """Queue timelines to be computed in the next turns. Without a model, there are none."""
        if self._engine is None:
            self._mailbox.send(client, timelines_answer(message.request, []))
            return
        work = self._engine.compute_timelines(
            message.names, self._clients.get_name, are_beginnings=message.are_beginnings
        )
        if (refusal := self._timelines.add(client, message, work)) is not None:
            self._mailbox.send(client, refusal)

    def _stats(self) -> EngineStats:
        own = EngineStats(clients=len(self._clients))
        if self._engine is not None:
            wire_errors = self._mailbox.num_wire_errors + self._worker.num_foreign_messages
            own = self._engine.stats(clients=len(self._clients), wire_errors=wire_errors)
        worker = self._worker_watch.status(self._engine, time.monotonic())
        return replace(own, num_refused_early=self._num_refused_early, worker=worker)
