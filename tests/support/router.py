"""A router in front of two real engines. The test decides when each request moves on from P to D.

The router's decisions are those of `gateway.fleet.handoff`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gateway.fleet.handoff import Handoff, HandoffAction, HandoffEvent, HandoffState
from protocol.engine.messages import Accepted, Goodbye, KeepKV, Message, Output, Refused, ReleaseKV
from protocol.engine.sampling import SamplingParams
from protocol.engine.session import RequestReport, Session
from protocol.wire.errors import EngineError
from tests.support.raw_client import RawClient

KEEP_EVERY_S = 0.25
TURN_MS = 5


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@dataclass(eq=False)
class RouterCase:
    """A request that is sent to P and then to D.

    is_held    whether P's handle is not passed on to D yet
    kept       P's handle, while its lease is needed; else ""
    passed     the handle that was sent to D
    end        the last report; after an abort, the engine's acknowledgement
    """

    prompt: list[int]
    max_tokens: int
    is_held: bool = False
    handoff: Handoff = field(default_factory=lambda: Handoff(HandoffState.COMPUTING))
    at_p: int = 0
    at_d: int = 0
    kept: str = ""
    passed: str = ""
    tokens: list[int] = field(default_factory=list)
    end: Output | Refused | None = None

    def finish(self, end: Output | Refused) -> None:
        assert self.end is None, "a request has one end"
        self.end = end


class RouterLine:
    """The router's connection to one engine."""

    def __init__(self, address: str) -> None:
        self.session = Session("router")
        self._listeners: dict[int, Callable[[Any], None]] = {}
        self._client = RawClient(address)

    def send(self, message: Message | None) -> None:
        if message is not None:
            self._client.send(message)

    def ask(self, case: RouterCase, on_report: Callable[[Any], None], **asked: Any) -> int:
        """Send a request, and return its number. Raises EngineError if the engine is not ready."""
        message = self.session.generate(case.prompt, greedy(case.max_tokens), **asked)
        self._listeners[message.request] = on_report
        self.send(message)
        return message.request

    def poll(self) -> None:
        """Send the messages that are due, and dispatch those that have arrived."""
        messages, reports = self.session.tick(time.monotonic())
        for message in messages:
            self.send(message)
        self._dispatch(reports)
        wait_ms = TURN_MS
        while self._client.socket.poll(wait_ms):
            # This also reads probes, because a probe may be the only message.
            self._dispatch(self.session.receive(self._client.receive_any(), time.monotonic()))
            wait_ms = 0

    def _dispatch(self, reports: list[RequestReport]) -> None:
        for number, report in reports:
            self._listeners[number](report)

    def close(self) -> None:
        self._client.close()


class Router:
    """A router between the engines P and D.

    passes_on   returns the handle to send to D, given the case and P's handle
    keeps       whether leases that are needed are kept alive
    """

    def __init__(self, p: str, d: str, passes_on: Callable[[RouterCase, str], str]) -> None:
        self.p, self.d = RouterLine(p), RouterLine(d)
        self.keeps = True
        self._passes_on = passes_on
        self._cases: list[RouterCase] = []
        self._kept_at = 0.0

    # ---- commands of the test

    def until(self, claim: Callable[[], object], within_s: float) -> bool:
        """Run the router until `claim` is true. Return False if it was not true within
        `within_s`."""
        give_up = time.monotonic() + within_s
        while not claim():
            if time.monotonic() > give_up:
                return False
            self.p.poll()
            self.d.poll()
            self._keep()
        return True

    def ask(self, case: RouterCase) -> RouterCase:
        self._cases.append(case)
        case.at_p = self.p.ask(case, partial(self._on_p_report, case), kv_readers=1)
        return case

    def hand_on(self, case: RouterCase) -> None:
        """Let D continue the request, now or as soon as P has computed the prompt."""
        case.is_held = False
        if case.kept:
            self._on(case, HandoffEvent.COMPUTED)

    def abort(self, case: RouterCase) -> None:
        """Abort a request. It ends with the engine's report, or now if no engine has it open."""
        is_at_no_engine = bool(case.kept) and not case.at_d
        self._on(case, HandoffEvent.ABORT)
        if is_at_no_engine:
            case.finish(Output(request=0, finish="abort"))

    def leave(self) -> None:
        try:
            for line in (self.p, self.d):
                line.send(Goodbye())
                line.poll()
        finally:
            self.vanish()

    def vanish(self) -> None:
        """Close both connections without a Goodbye."""
        self.p.close()
        self.d.close()

    # ---- reports of the engines

    def _on_p_report(self, case: RouterCase, report: Any) -> None:
        if isinstance(report, Accepted):
            return
        if isinstance(report, Output) and report.kv_handle:
            if (
                case.handoff.state is HandoffState.ENDED
            ):  # it was computed before the Abort was read
                self.p.send(ReleaseKV(handles=[report.kv_handle]))
                case.finish(Output(request=0, finish="abort"))
                return
            case.kept = report.kv_handle
            if not case.is_held:
                self._on(case, HandoffEvent.COMPUTED)
        elif case.handoff.state is HandoffState.ENDED:
            case.finish(report)
        else:
            self._on(case, HandoffEvent.MISSED, report)

    def _on_d_report(self, case: RouterCase, report: Any) -> None:
        if isinstance(report, Output):
            case.tokens += report.tokens
        is_end = isinstance(report, Refused) or (isinstance(report, Output) and report.finish)
        if case.handoff.state is HandoffState.ENDED and is_end:
            case.finish(report)
        elif isinstance(report, Accepted):
            self._on(case, HandoffEvent.ACCEPTED, report)
        else:
            self._on(case, HandoffEvent.FINISHED if is_end else HandoffEvent.TOKENS, report)

    # ---- actions

    def _on(self, case: RouterCase, event: HandoffEvent, report: Any = None) -> None:
        for action in case.handoff.on(event):
            match action:
                case HandoffAction.CONTINUE:
                    self._ask_d(case, self._passes_on(case, case.kept))
                case HandoffAction.COMPUTE_ALL:
                    self._ask_d(case, "")
                case HandoffAction.EMIT if event is HandoffEvent.FINISHED:
                    case.finish(report)
                case HandoffAction.RELEASE:
                    self._leave(case, is_abort=event is HandoffEvent.ABORT)
                case HandoffAction.ABORT:
                    self.d.send(self.d.session.request_abort(case.at_d))

    def _ask_d(self, case: RouterCase, handle: str) -> None:
        case.passed = handle
        try:
            case.at_d = self.d.ask(case, partial(self._on_d_report, case), kv_handle=handle)
        except EngineError as error:
            end = Output(request=0, finish="error", error=error.info())
            self._on(case, HandoffEvent.FINISHED, end)

    def _leave(self, case: RouterCase, *, is_abort: bool) -> None:
        if case.kept:
            self.p.send(ReleaseKV(handles=[case.kept]))
            case.kept = ""
        else:
            self.p.send(self.p.session.request_abort(case.at_p))

    def _keep(self) -> None:
        now = time.monotonic()
        handles = [case.kept for case in self._cases if case.kept]
        if self.keeps and handles and now - self._kept_at > KEEP_EVERY_S:
            self._kept_at = now
            self.p.send(KeepKV(handles=handles))


def all_ended(cases: Iterable[RouterCase]) -> bool:
    return all(case.end is not None for case in cases)
