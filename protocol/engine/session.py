"""The client's half of the protocol with an engine, without I/O.

A session numbers requests, tracks which are open, and turns messages into reports on each request.
The client libraries and the gateway use the same class, so they behave alike. The current time is
an argument, in seconds of any steady clock. A session guarantees:

- An opened request gets exactly one end: `Refused`, the reply to its command, or an `Output` with
  `finish`.
- If the engine is lost, the session itself produces that end: every open request ends with
  finish="error". An engine is lost if it sends EngineStopped, is silent beyond the lease, restarts
  with a new epoch, or if the connection to it breaks.
- After its end, or after `abort`, a request gets no more reports. Late messages are dropped, and so
  are messages that do not answer the request.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypedDict, TypeVar, Unpack

from protocol.engine.adapters import AdapterInfo
from protocol.engine.attachments import AttachedTensor, Attachment
from protocol.engine.encoding import EncodeInputs
from protocol.engine.grammar import Grammar
from protocol.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortByLabel,
    Aborted,
    Accepted,
    Account,
    AdapterChanged,
    Adapters,
    AttachData,
    Encode,
    EngineStatus,
    EngineStopped,
    Generate,
    GetStatus,
    GetTimeline,
    Goodbye,
    Hello,
    Limits,
    LoadAdapter,
    Loading,
    Output,
    Outputs,
    Ping,
    Pong,
    Probe,
    Profile,
    Profiled,
    Refused,
    RequestTimelines,
    ResourcesFreed,
    SessionLost,
    ToClient,
    ToEngine,
    UnloadAdapter,
    Welcome,
)
from protocol.engine.model_card import ModelCard
from protocol.engine.sampling import SamplingParams
from protocol.engine.stats import EngineStats
from protocol.engine.timeline import AbortReason
from protocol.wire.arrays import Int32
from protocol.wire.errors import (
    AttachmentMissing,
    EngineLost,
    EngineNotReady,
    ErrorInfo,
    ServingError,
    WireError,
)

PING_EVERY_S = 0.5
LEASE_S = 4.0
MAX_LOADING_RETRY_S = 10.0
MAX_REMEMBERED_DIGESTS = 4096
MAX_TICK_GAP_S = 1.0
"""If more time passes between two calls of `tick`, this process was suspended or too busy."""

RequestReport = tuple[
    int,
    Accepted
    | Refused
    | Output
    | Aborted
    | AdapterChanged
    | Profiled
    | EngineStatus
    | RequestTimelines,
]
"""A request, and a report on it."""

Command = TypeVar(
    "Command",
    Generate,
    Encode,
    AbortByLabel,
    Profile,
    LoadAdapter,
    UnloadAdapter,
    GetStatus,
    GetTimeline,
)
"""A message that opens a request. If the engine is lost, the request ends with an error."""
REPLY_TYPES: dict[type, tuple[type, ...]] = {
    Generate: (Accepted, Refused, Output),
    Encode: (Accepted, Refused, Output),
    AbortByLabel: (Aborted,),
    Profile: (Profiled, Refused),
    LoadAdapter: (AdapterChanged, Refused),
    UnloadAdapter: (AdapterChanged, Refused),
    GetStatus: (EngineStatus,),
    GetTimeline: (RequestTimelines, Refused),
}
"""Command -> the reports that may answer it."""


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
    answer: Int32 | None
    mirostat_mu: float | None
    adapter: str
    adapter_digest: str
    attachments: list[Attachment]


class EncodeOptions(TypedDict, total=False):
    """Optional fields of `Encode`, with the meanings and defaults declared there."""

    priority: int
    labels: list[str]
    account: Account | None
    timeout_s: float
    queue_timeout_s: float
    is_moved: bool


class Session:
    """One client's session with one engine.

    `model`, `limits` and `epoch` come from the last Welcome, and are None before the first one.
    When the engine is lost, `epoch` is None until the next Welcome.
    """

    def __init__(self, name: str, *, lease_s: float = LEASE_S) -> None:
        self.model: ModelCard | None = None
        self.limits: Limits | None = None
        self.epoch: str | None = None
        #: The LoRA adapters that requests can use, as the engine last sent them.
        self.adapters: list[AdapterInfo] = []
        self.stats = EngineStats()
        self.open: dict[int, type] = {}  # request -> type of the message that opened it
        self.not_ready_error: ServingError = EngineNotReady("the engine has not answered yet")
        self.last_received_at: float | None = None  # time of the last message
        self.num_refused_early = 0  # by this client, from a cached refusal, since the last Ping
        self._name = name
        self._lease_s = lease_s
        self._next_request = 1
        self._last_sent_at = float("-inf")
        self._last_tick_at: float | None = None
        self._is_connected = False
        self._is_loading = False
        self._num_welcomes = 0
        self._read_bytes = 0
        self._stats_epoch: str | None = None
        self._attached: set[str] = set()  # digests of the content sent to this engine

    @property
    def has_stats(self) -> bool:
        """Whether `stats` were sent by the current engine."""
        return self.is_ready and self._stats_epoch == self.epoch

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests. If not, `not_ready_error` gives the reason."""
        return self.epoch is not None

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        **options: Unpack[GenerateOptions],
    ) -> Generate:
        """Open a generation. Return the message to send. Raises EngineNotReady or EngineLost if
        there is no engine, WireError if the engine uses another protocol version."""
        self._check_ready()
        prompt = prompt if isinstance(prompt, Int32) else Int32.of(prompt)
        return self._opened(
            Generate(request=self._next_request, prompt=prompt, params=params, **options)
        )

    def attach(self, digest: str, tensors: list[AttachedTensor]) -> AttachData | None:
        """Return the message with the content of an attachment, to be sent before the requests that
        name its digest; None if the engine should have it. If the engine then refuses a request
        with AttachmentMissing, call this again for all attachments of the request, and repeat the
        request once."""
        if digest in self._attached:
            return None
        if len(self._attached) >= MAX_REMEMBERED_DIGESTS:
            self._attached.clear()
        self._attached.add(digest)
        return AttachData(digest=digest, tensors=tensors)

    def encode(self, inputs: EncodeInputs, **options: Unpack[EncodeOptions]) -> Encode:
        """Open a request that encodes `inputs`. Return the message to send. Raises as `generate`
        does."""
        self._check_ready()
        return self._opened(Encode(request=self._next_request, inputs=inputs, **options))

    def abort_by_label(self, names: Sequence[str], *, everything: bool = False) -> AbortByLabel:
        """Open a request that aborts requests of any client by name. Return the message to send.

        everything   abort all requests, and ignore `names`

        The opened request ends with an Aborted, or with an error if the engine is lost. Raises as
        `generate` does.
        """
        return self._opened(
            AbortByLabel(request=self._next_request, names=list(names), everything=everything)
        )

    def profile(self, steps: int, directory: str) -> Profile:
        """Open a request for a profile, which ends with Profiled or Refused. Return the message to
        send."""
        return self._opened(Profile(request=self._next_request, steps=steps, directory=directory))

    def load_adapter(self, name: str, path: str) -> LoadAdapter:
        """Open a request to load a LoRA adapter, which ends with AdapterChanged or Refused. Return
        the message to send. Raises as `generate` does."""
        return self._opened(LoadAdapter(request=self._next_request, name=name, path=path))

    def unload_adapter(self, name: str) -> UnloadAdapter:
        """Open a request to unload a LoRA adapter, which ends with AdapterChanged, once its memory
        is freed, or Refused. Return the message to send. Raises as `generate` does."""
        return self._opened(UnloadAdapter(request=self._next_request, name=name))

    def get_status(self, max_rows: int, after_step: int | None = None) -> GetStatus:
        """Open a request for the status, which ends with an EngineStatus. Return the message to
        send."""
        return self._opened(
            GetStatus(request=self._next_request, max_rows=max_rows, after_step=after_step)
        )

    def get_timeline(self, names: Sequence[str], *, are_beginnings: bool = False) -> GetTimeline:
        """Open a request for timelines, which ends with RequestTimelines or Refused. Return the
        message to send."""
        message = GetTimeline(
            request=self._next_request, names=list(names), are_beginnings=are_beginnings
        )
        return self._opened(message)

    def _opened(self, message: Command) -> Command:
        """Record that the request of `message` is open. Return `message`."""
        self._check_ready()
        self._next_request += 1
        self.open[message.request] = type(message)
        return message

    def _check_ready(self) -> None:
        if not self.is_ready:
            error = self.not_ready_error
            raise type(error)(error.message, retry_after_s=error.retry_after_s)

    def abort(self, request: int, reason: AbortReason = "") -> Abort | None:
        """End `request` without a report. Return the message to send; None if it has ended."""
        if request not in self.open:
            return None
        del self.open[request]
        return Abort(requests=[request], reason=reason)

    def request_abort(self, request: int, reason: AbortReason = "") -> Abort | None:
        """Return the message that aborts `request`; None if the request has ended already. Unlike
        after `abort`, the request stays open until the engine reports its end."""
        return Abort(requests=[request], reason=reason) if request in self.open else None

    def goodbye(self) -> Goodbye:
        """End all requests without a report. Return the last message to send, after which the
        session is closed."""
        self.open.clear()
        self.epoch = None
        return Goodbye()

    def receive(self, message: ToClient, now: float) -> list[RequestReport]:
        """Handle one message from the engine. Return its reports on open requests."""
        self.last_received_at = now
        match message:
            case Outputs():
                return self._on_outputs(message)
            case Accepted(request=request):
                return [(request, message)] if self._is_answer(request, message) else []
            case Refused(request=-1, error=error):
                # The engine could not read one of our messages, so it may lack some open requests.
                # A new Hello makes it drop all requests of this client.
                self._last_sent_at = float("-inf")
                return self._on_lost(
                    f"the engine could not read this client's message: {error.message}"
                )
            case SessionLost(why=why):
                self._last_sent_at = float("-inf")
                # Before Welcome, SessionLost answers a message meant for the previous engine.
                return self._on_lost(why) if self.is_ready else []
            case Loading(elapsed_s=elapsed_s):
                self._on_loading(elapsed_s)
                return []
            case Probe():
                self._last_sent_at = float("-inf")  # Ping at the next tick
                return []
            case Adapters(adapters=adapters):
                self.adapters = adapters
                return []
            case (
                Refused()
                | Aborted()
                | AdapterChanged()
                | Profiled()
                | EngineStatus()
                | RequestTimelines()
            ):
                return self._on_last_reply(message)
            case ResourcesFreed():
                return []  # the ends of these requests were reported already
            case Welcome():
                return self._on_welcome(message)
            case Pong():
                return self._on_pong(message)
            case EngineStopped(error=error):
                return self._on_lost(error.message)

    def on_connected(self) -> None:
        """Handle a new connection: the next `tick` returns a Hello."""
        self._is_connected = True
        if not self.is_ready:
            self._last_sent_at = float("-inf")

    def on_disconnected(self) -> list[RequestReport]:
        """Handle a broken connection or a failed attempt to connect. Return the reports that end
        all open requests: the engine drops a client whose connection breaks.

        Call this after all messages that arrived over the connection have been received. A failed
        attempt changes nothing: if the process was busy, it may already have received messages of a
        later connection that succeeded.
        """
        if not self._is_connected:
            return []
        self._is_connected = False
        reason = "the connection to the engine broke"
        if self._is_loading:
            self._is_loading, self.not_ready_error = False, EngineLost(reason)
        return self._on_lost(reason) if self.is_ready else []

    def on_exited(self) -> list[RequestReport]:
        """Handle the exit of the engine's process, which its supervisor may notice before the
        connection breaks. Return the reports that end all open requests. The next `tick` returns a
        Hello.

        Call this after all messages that have arrived from the engine have been received.
        """
        if not self.is_ready:
            return []
        self._last_sent_at = float("-inf")
        return self._on_lost("the engine has exited")

    def tick(self, now: float) -> tuple[list[ToEngine], list[RequestReport]]:
        """Return the messages to send at `now`, and reports for the requests that are lost because
        the engine has been silent for too long. Call this a few times a second."""
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
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            name=self._name,
            pid=os.getpid(),
            num_welcomes=self._num_welcomes,
        )
        return [hello], reports

    def _discount_sleep(self, now: float) -> None:
        """Do not count time during which this process was suspended as silence of the engine."""
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
        self,
        report: Refused | Aborted | AdapterChanged | Profiled | EngineStatus | RequestTimelines,
    ) -> list[RequestReport]:
        if not self._is_answer(report.request, report):
            return []
        if isinstance(report, Refused) and report.error.code == AttachmentMissing.code:
            self._attached.clear()
        del self.open[report.request]
        return [(report.request, report)]

    def _is_answer(self, request: int, report: object) -> bool:
        return request in self.open and isinstance(report, REPLY_TYPES[self.open[request]])

    def _on_welcome(self, message: Welcome) -> list[RequestReport]:
        self._num_welcomes += 1
        if message.protocol != PROTOCOL_VERSION:
            self.not_ready_error = WireError(
                f"the engine uses protocol {message.protocol}, this client {PROTOCOL_VERSION}"
            )
            return []
        reports = [] if message.epoch == self.epoch else self._on_lost("the engine was restarted")
        self.model, self.limits, self.epoch = message.model, message.limits, message.epoch
        self.adapters = message.adapters
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
        # Before Welcome all losses are reported already, and this may be an old Pong.
        return self._on_lost("the engine was restarted") if self.is_ready else []

    def _on_lost(self, reason: str) -> list[RequestReport]:
        self.not_ready_error = EngineLost(reason)
        self.epoch = None
        self._read_bytes = 0
        self._attached.clear()
        lost, self.open = sorted(self.open), {}
        error = ErrorInfo(code=EngineLost.code, message=reason)
        return [(request, Output(request=request, finish="error", error=error)) for request in lost]
