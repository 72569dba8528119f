"""The client's half of the conversation with an engine, without I/O.

A session numbers requests, remembers which are open, and turns messages into news for each of them.
It is shared by the blocking client library and the gateway's green client, so they cannot drift.
Time is an argument (seconds of any steady clock). Its laws:

- a request that was opened gets exactly one end: `Refused`, or an `Output` with `finish`;
- the end may be the session's own word: when the engine says Gone, the connection breaks, or it
  falls silent beyond the lease, or comes back in a new epoch, every open request ends with
  finish="error";
- after its end, or after `abort`, a request gets no more news: late frames are dropped, and so is
  what is no answer to what was asked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypedDict, Unpack

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
ASLEEP_S = 1.0
"""Who calls `tick` no more often has been asleep."""

News = tuple[int, Accepted | Refused | Output | Aborted | Profiled | EngineStatus]
"""(request, what happened to it)"""

Answers = tuple[type, ...]
GENERATED: Answers = (Accepted, Refused, Output)
ABORTED: Answers = (Aborted,)
PROFILED: Answers = (Profiled, Refused)
SEEN: Answers = (EngineStatus,)


class GenerateOptions(TypedDict, total=False):
    """What a request may say beside its prompt and its parameters: fields of `Generate`, which has
    their meanings and their defaults."""

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
    """One client's view of one engine. `model`, `limits` and `epoch` are None until its Welcome."""

    def __init__(self, name: str, *, lease_s: float = LEASE_S) -> None:
        self.model: ModelCard | None = None
        self.limits: Limits | None = None
        self.epoch: str | None = None
        self.stats = EngineStats()
        self.open: dict[int, Answers] = {}  # with what may be said of each
        self.trouble: ServingError = EngineNotReady("the engine has not answered yet")
        self.heard_at: float | None = None  # when the engine last said anything
        self.num_early = 0  # requests refused in its words, of which it has not heard
        self._name = name
        self._lease_s = lease_s
        self._next_request = 1
        self._said_at = float("-inf")
        self._ticked_at: float | None = None
        self._is_loading = False
        self._read_bytes = 0
        self._stats_epoch: str | None = None

    @property
    def has_stats(self) -> bool:
        """`stats` are the engine's that is there now."""
        return self.is_ready and self._stats_epoch == self.epoch

    @property
    def is_ready(self) -> bool:
        """The engine is there and takes requests; `trouble` says why not."""
        return self.epoch is not None

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        **terms: Unpack[GenerateOptions],
    ) -> Generate:
        """The message that opens a request.

        Raises EngineNotReady or EngineLost when there is no engine.
        """
        self._check_ready()
        message = Generate(
            request=self._next_request,
            prompt=prompt if isinstance(prompt, Int32) else Int32.of(prompt),
            params=params,
            **terms,
        )
        self._next_request += 1
        self.open[message.request] = GENERATED
        return message

    def abort_named(self, names: Sequence[str], *, everything: bool = False) -> AbortByLabel:
        """The message that ends requests by their names, or all, whose ever they are. It opens a
        request of its own, whose only news is an Aborted; or, with the engine, it is lost as any
        other.

        Raises EngineNotReady or EngineLost when there is no engine.
        """
        self._check_ready()
        message = AbortByLabel(request=self._next_request, names=list(names), everything=everything)
        self._next_request += 1
        self.open[message.request] = ABORTED
        return message

    def profile(self, steps: int, directory: str) -> Profile:
        """The message that asks for a profile. As `abort_named`, but its only news is Profiled."""
        self._check_ready()
        message = Profile(request=self._next_request, steps=steps, directory=directory)
        self._next_request += 1
        self.open[message.request] = PROFILED
        return message

    def look(self, most: int) -> GetStatus:
        """The message that asks what the engine does. As `abort_named`, but its news is a View."""
        self._check_ready()
        message = GetStatus(request=self._next_request, most=most)
        self._next_request += 1
        self.open[message.request] = SEEN
        return message

    def abort(self, request: int) -> Abort | None:
        """Forget `request`; the message to send, or None if it has ended already."""
        if request not in self.open:
            return None
        del self.open[request]
        return Abort(requests=[request])

    def stop(self, request: int) -> Abort | None:
        """As `abort`, but its end is still news: who has to know how far it came."""
        return Abort(requests=[request]) if request in self.open else None

    def leave(self) -> Goodbye:
        """Forget everything; the last message to send."""
        self.open.clear()
        self.epoch = None
        return Goodbye()

    def receive(self, message: ToClient, now: float) -> list[News]:
        """Take in one message; the news it holds for open requests."""
        self.heard_at = now
        match message:
            case Outputs():
                return self._outputs(message)
            case Accepted(request=request):
                return [(request, message)] if self._is_answer(request, message) else []
            case Refused(request=-1, error=error):
                # It could not read something we said, so we cannot know what it thinks is open.
                # Greeting it anew makes it forget all of that.
                self._said_at = float("-inf")
                return self._lose(f"the engine did not understand this client: {error.message}")
            case SessionLost(why=why):
                self._said_at = float("-inf")
                # Before a Welcome it answers what was sent to an engine that is gone.
                return self._lose(why) if self.is_ready else []
            case Loading(elapsed_s=elapsed_s):
                self._load(elapsed_s)
                return []
            case Probe():
                self._said_at = float("-inf")  # a Ping with the next tick
                return []
            case Refused() | Aborted() | Profiled() | EngineStatus():
                return self._end(message)
            case ResourcesFreed():
                return []  # of requests that have ended
            case Welcome():
                return self._welcome(message)
            case Pong():
                return self._pong(message)
            case EngineStopped(error=error):
                return self._lose(error.message)

    def connected(self) -> None:
        """There is a connection (again): greet who is there at the next tick."""
        if not self.is_ready:
            self._said_at = float("-inf")

    def disconnected(self) -> list[News]:
        """The connection broke: an engine forgets who has gone, and knows no one by another. Call
        when all that came over it has been received."""
        why = "the connection to the engine broke"
        if self._is_loading:
            self._is_loading, self.trouble = False, EngineLost(why)
        return self._lose(why) if self.is_ready else []

    def tick(self, now: float) -> tuple[list[ToEngine], list[News]]:
        """Call a few times a second: what to send (at most a greeting or a ping), and news of
        losses.
        """
        self._forgive(now)
        news: list[News] = []
        if self.is_ready and self.heard_at is not None and now - self.heard_at > self._lease_s:
            news = self._lose(f"the engine has been silent for {now - self.heard_at:.1f} s")
        if now - self._said_at < PING_EVERY_S * 0.9:
            return [], news
        self._said_at = now
        if self.is_ready:
            num_early, self.num_early = self.num_early, 0
            return [Ping(num_early=num_early, read_bytes=self._read_bytes)], news
        return [Hello(protocol=PROTOCOL_VERSION, name=self._name, pid=os.getpid())], news

    def _forgive(self, now: float) -> None:
        """Silence counts while we ask and listen: not the time in which nobody called `tick`, for
        this process had no time itself, or was stopped."""
        slept_s = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if self.heard_at is not None and slept_s > ASLEEP_S:
            self.heard_at = min(now, self.heard_at + slept_s)

    def _check_ready(self) -> None:
        if not self.is_ready:
            raise type(self.trouble)(self.trouble.message, retry_after_s=self.trouble.retry_after_s)

    def _outputs(self, message: Outputs) -> list[News]:
        news: list[News] = []
        for output in message.outputs:
            if self._is_answer(output.request, output):
                news.append((output.request, output))
                if output.finish is not None:
                    del self.open[output.request]
        return news

    def _end(self, report: Refused | Aborted | Profiled | EngineStatus) -> list[News]:
        if not self._is_answer(report.request, report):
            return []
        del self.open[report.request]
        return [(report.request, report)]

    def _is_answer(self, request: int, report: object) -> bool:
        return isinstance(report, self.open.get(request, ()))

    def _welcome(self, message: Welcome) -> list[News]:
        if message.protocol != PROTOCOL_VERSION:
            self.trouble = WireError(
                f"the engine speaks protocol {message.protocol}, this client {PROTOCOL_VERSION}"
            )
            return []
        news = [] if message.epoch == self.epoch else self._lose("the engine was restarted")
        self.model, self.limits, self.epoch = message.model, message.limits, message.epoch
        self._is_loading = False
        self._said_at = float("-inf")  # a Ping with the next tick: its answer brings the stats
        return news

    def _load(self, elapsed_s: float) -> None:
        self._is_loading = True
        self.trouble = EngineNotReady(
            f"the model is loading ({elapsed_s:.0f} s so far)",
            retry_after_s=min(max(elapsed_s, 1.0), MAX_LOADING_RETRY_S),
        )

    def _pong(self, message: Pong) -> list[News]:
        if message.epoch == self.epoch:
            self.stats, self._stats_epoch = message.stats, message.epoch
            self._read_bytes = max(self._read_bytes, message.sent_bytes)
            return []
        self._said_at = float("-inf")  # greet who is there at the next tick, not a second later
        # What was lost before is told already, and why: this may be an old answer.
        return self._lose("the engine was restarted") if self.is_ready else []

    def _lose(self, why: str) -> list[News]:
        self.trouble = EngineLost(why)
        self.epoch = None
        self._read_bytes = 0
        lost, self.open = sorted(self.open), {}
        error = ErrorInfo(code=EngineLost.code, message=why)
        return [(request, Output(request=request, finish="error", error=error)) for request in lost]
