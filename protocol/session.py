"""The client's half of the protocol with an engine, without I/O.

A session numbers requests, tracks which are open, and turns messages into reports on each request.
The client libraries and the gateway share it, so they cannot drift. Time is an argument (seconds of
any steady clock). Its laws:

- an opened request gets exactly one end: `Refused`, or an `Output` with `finish`;
- the session itself can produce that end: if the engine sends EngineStopped, is silent beyond the
  lease, restarts with a new epoch, or its connection breaks, every open request ends with
  finish="error";
- after its end, or after `abort`, a request gets no more reports: late messages are dropped, and so
  are messages that do not answer the request.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypedDict, TypeVar, Unpack

from protocol.arrays import Int32
from protocol.errors import EngineLost, EngineNotReady, ErrorInfo, ServingError, WireError
from protocol.grammar import Grammar
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortByLabel,
    Aborted,
    Accepted,
    Account,
    EngineStatus,
    EngineStopped,
    Generate,
    GetStatus,
    Goodbye,
    Hello,
    Limits,
    Loading,
    Output,
    Outputs,
    Ping,
    Pong,
    Probe,
    Profile,
    Profiled,
    Refused,
    ResourcesFreed,
    SessionLost,
    ToClient,
    ToEngine,
    Welcome,
)
from protocol.model_card import ModelCard
from protocol.sampling import SamplingParams
from protocol.stats import EngineStats

PING_EVERY_S = 0.5
LEASE_S = 4.0
MAX_LOADING_RETRY_S = 10.0
MAX_TICK_GAP_S = 1.0
"""After a longer time without a `tick`, this process was suspended or too busy."""

RequestReport = tuple[int, Accepted | Refused | Output | Aborted | Profiled | EngineStatus]
"""(request, report on it)"""

Command = TypeVar("Command", Generate, AbortByLabel, Profile, GetStatus)
"""A message that opens a request. An engine that is lost ends it with an error."""
REPLY_TYPES: dict[type, tuple[type, ...]] = {
    Generate: (Accepted, Refused, Output),
    AbortByLabel: (Aborted,),
    Profile: (Profiled, Refused),
    GetStatus: (EngineStatus,),
}


class GenerateOptions(TypedDict, total=False):
    """Optional fields of `Generate`, with the meanings and defaults declared there."""

    namespace: str
    priority: int
    grammar: Grammar | None
    labels: list[str]
    kv_readers: int
    kv_handle: str
    account: Account | None
    is_first: bool
    timeout_s: float
    queue_timeout_s: float


class Session:
    """One client's session with one engine. Until Welcome, model, limits and epoch are None."""

    def __init__(self, name: str, *, lease_s: float = LEASE_S) -> None:
        self.model: ModelCard | None = None
        self.limits: Limits | None = None
        self.epoch: str | None = None
        self.stats = EngineStats()
        self.open: dict[int, type] = {}  # request -> type of the message that opened it
        self.not_ready_error: ServingError = EngineNotReady("the engine has not answered yet")
        self.last_received_at: float | None = None  # time of the last message
        self.num_refused_early = 0  # refused from a cached refusal, since the last Ping
        self._name = name
        self._lease_s = lease_s
        self._next_request = 1
        self._last_sent_at = float("-inf")
        self._last_tick_at: float | None = None
        self._is_loading = False
        self._read_bytes = 0
        self._stats_epoch: str | None = None

    @property
    def has_stats(self) -> bool:
        """Whether `stats` are those of the current engine."""
        return self.is_ready and self._stats_epoch == self.epoch

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests; if not, `not_ready_error` says why."""
        return self.epoch is not None

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        **options: Unpack[GenerateOptions],
    ) -> Generate:
        """Return the message that opens a request.

        Raises EngineNotReady or EngineLost if there is no engine.
        """
        self._check_ready()
        prompt = prompt if isinstance(prompt, Int32) else Int32.of(prompt)
        return self._opened(
            Generate(request=self._next_request, prompt=prompt, params=params, **options)
        )

    def abort_by_label(self, names: Sequence[str], *, everything: bool = False) -> AbortByLabel:
        """Return the message that aborts requests of any client by their names, or all of them.

        It opens a request of its own, which ends with an Aborted, or with an error if the engine is
        lost. Raises EngineNotReady or EngineLost if there is no engine.
        """
        return self._opened(
            AbortByLabel(request=self._next_request, names=list(names), everything=everything)
        )

    def profile(self, steps: int, directory: str) -> Profile:
        """Return the message that starts a profile. It ends with Profiled or Refused."""
        return self._opened(Profile(request=self._next_request, steps=steps, directory=directory))

    def get_status(self, max_rows: int) -> GetStatus:
        """Return the message that requests the status. It ends with EngineStatus."""
        return self._opened(GetStatus(request=self._next_request, most=max_rows))

    def _opened(self, message: Command) -> Command:
        """Open the request of `message`, and return the message."""
        self._check_ready()
        self._next_request += 1
        self.open[message.request] = type(message)
        return message

    def _check_ready(self) -> None:
        if not self.is_ready:
            error = self.not_ready_error
            raise type(error)(error.message, retry_after_s=error.retry_after_s)

    def abort(self, request: int) -> Abort | None:
        """Forget `request`. Return the message to send, or None if it has ended already."""
        if request not in self.open:
            return None
        del self.open[request]
        return Abort(requests=[request])

    def request_abort(self, request: int) -> Abort | None:
        """Return the message that aborts `request`, which stays open until its end is reported."""
        return Abort(requests=[request]) if request in self.open else None

    def goodbye(self) -> Goodbye:
        """Forget all requests. Return the last message to send."""
        self.open.clear()
        self.epoch = None
        return Goodbye()

    def receive(self, message: ToClient, now: float) -> list[RequestReport]:
        """Handle one message. Return its reports on open requests."""
        self.last_received_at = now
        match message:
            case Outputs():
                return self._on_outputs(message)
            case Accepted(request=request):
                return [(request, message)] if self._is_answer(request, message) else []
            case Refused(request=-1, error=error):
                # The engine could not read one of our messages, so our views of the open requests
                # may differ. A new Hello makes it forget all of them.
                self._last_sent_at = float("-inf")
                return self._on_lost(
                    f"the engine could not read this client's message: {error.message}"
                )
            case SessionLost(why=why):
                self._last_sent_at = float("-inf")
                # Before a Welcome it answers a message that was sent to the previous engine.
                return self._on_lost(why) if self.is_ready else []
            case Loading(elapsed_s=elapsed_s):
                self._on_loading(elapsed_s)
                return []
            case Probe():
                self._last_sent_at = float("-inf")  # Ping at the next tick
                return []
            case Refused() | Aborted() | Profiled() | EngineStatus():
                return self._on_last_reply(message)
            case ResourcesFreed():
                return []  # these requests have ended already
            case Welcome():
                return self._on_welcome(message)
            case Pong():
                return self._on_pong(message)
            case EngineStopped(error=error):
                return self._on_lost(error.message)

    def on_connected(self) -> None:
        """Handle a new connection: Hello is sent at the next tick."""
        if not self.is_ready:
            self._last_sent_at = float("-inf")

    def on_disconnected(self) -> list[RequestReport]:
        """Handle a broken connection: the engine has forgotten this client. Return the ends of all
        open requests. Call it after everything that arrived over the connection has been received.
        """
        reason = "the connection to the engine broke"
        if self._is_loading:
            self._is_loading, self.not_ready_error = False, EngineLost(reason)
        return self._on_lost(reason) if self.is_ready else []

    def tick(self, now: float) -> tuple[list[ToEngine], list[RequestReport]]:
        """Return messages to send and the ends of lost requests. Call it a few times a second."""
        self._discount_sleep(now)
        reports: list[RequestReport] = []
        if (
            self.is_ready
            and self.last_received_at is not None
            and now - self.last_received_at > self._lease_s
        ):
            reports = self._on_lost(
                f"the engine has been silent for {now - self.last_received_at:.1f} s"
            )
        if now - self._last_sent_at < PING_EVERY_S * 0.9:
            return [], reports
        self._last_sent_at = now
        if self.is_ready:
            num_refused, self.num_refused_early = self.num_refused_early, 0
            return [Ping(num_early=num_refused, read_bytes=self._read_bytes)], reports
        return [Hello(protocol=PROTOCOL_VERSION, name=self._name, pid=os.getpid())], reports

    def _discount_sleep(self, now: float) -> None:
        """Do not count time in which this process was suspended as silence of the engine."""
        gap_s = 0.0 if self._last_tick_at is None else now - self._last_tick_at
        self._last_tick_at = now
        if self.last_received_at is not None and gap_s > MAX_TICK_GAP_S:
            self.last_received_at = min(now, self.last_received_at + gap_s)

    def _on_outputs(self, message: Outputs) -> list[RequestReport]:
        reports: list[RequestReport] = []
        for output in message.outputs:
            if self._is_answer(output.request, output):
                reports.append((output.request, output))
                if output.finish is not None:
                    del self.open[output.request]
        return reports

    def _on_last_reply(
        self, report: Refused | Aborted | Profiled | EngineStatus
    ) -> list[RequestReport]:
        if not self._is_answer(report.request, report):
            return []
        del self.open[report.request]
        return [(report.request, report)]

    def _is_answer(self, request: int, report: object) -> bool:
        return request in self.open and isinstance(report, REPLY_TYPES[self.open[request]])

    def _on_welcome(self, message: Welcome) -> list[RequestReport]:
        if message.protocol != PROTOCOL_VERSION:
            self.not_ready_error = WireError(
                f"the engine uses protocol {message.protocol}, this client {PROTOCOL_VERSION}"
            )
            return []
        reports = [] if message.epoch == self.epoch else self._on_lost("the engine was restarted")
        self.model, self.limits, self.epoch = message.model, message.limits, message.epoch
        self._is_loading = False
        self._last_sent_at = float("-inf")  # Ping at the next tick: the Pong brings the stats
        return reports

    def _on_loading(self, elapsed_s: float) -> None:
        self._is_loading = True
        self.not_ready_error = EngineNotReady(
            f"the model is loading ({elapsed_s:.0f} s so far)",
            retry_after_s=min(max(elapsed_s, 1.0), MAX_LOADING_RETRY_S),
        )

    def _on_pong(self, message: Pong) -> list[RequestReport]:
        if message.epoch == self.epoch:
            self.stats, self._stats_epoch = message.stats, message.epoch
            self._read_bytes = max(self._read_bytes, message.sent_bytes)
            return []
        self._last_sent_at = float("-inf")  # Hello at the next tick, not a second later
        # Without a session all losses are reported already; this may be an old Pong.
        return self._on_lost("the engine was restarted") if self.is_ready else []

    def _on_lost(self, reason: str) -> list[RequestReport]:
        self.not_ready_error = EngineLost(reason)
        self.epoch = None
        self._read_bytes = 0
        lost, self.open = sorted(self.open), {}
        error = ErrorInfo(code=EngineLost.code, message=reason)
        return [(request, Output(request=request, finish="error", error=error)) for request in lost]
