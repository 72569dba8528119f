"""Stage timer: how long a request spends in each stage of its life. Pure.

It switches when the request changes phase (request.STAGES) and at its first token, so it costs
nothing per step or token.
"""

from __future__ import annotations

from enum import Enum

from protocol.messages import Times


class RequestStage(Enum):
    """A stage of a request's life. The value is the field of Times that it adds to."""

    GRAMMAR = "grammar_s"
    QUEUE = "queued_s"
    FETCH = "fetching_s"
    PREFILL = "prefill_s"
    DECODE = "decode_s"
    PREEMPTED = "preempted_s"


class EngineClock:
    """The engine's current time, in seconds of a steady clock; shared by all its requests."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0


class StageTimer:
    """The time that one request has spent in each stage since its arrival."""

    __slots__ = ("_clock", "_has_token", "_since", "_spent", "_stage")

    def __init__(self, clock: EngineClock) -> None:
        self._clock = clock
        self._since = clock.now
        self._stage: RequestStage | None = RequestStage.GRAMMAR
        self._spent: dict[str, float] = {}
        self._has_token = False

    def enter(self, stage: RequestStage | None) -> None:
        """Switch to another stage; None means the request has ended.

        Once the first token exists, PREFILL counts as DECODE: tokens recomputed after a preemption
        are not prefill.
        """
        now = self._clock.now
        if self._stage is not None and now > self._since:
            name = self._stage.value
            self._spent[name] = self._spent.get(name, 0.0) + now - self._since
        self._since = now
        is_decoding = stage is RequestStage.PREFILL and self._has_token
        self._stage = RequestStage.DECODE if is_decoding else stage

    def on_first_token(self) -> None:
        """Record that the first token exists."""
        self._has_token = True
        self.enter(self._stage)

    @property
    def stage(self) -> str:
        """The current stage, without its unit; "" if the request has ended."""
        return "" if self._stage is None else self._stage.value.removesuffix("_s")

    def times(self) -> Times:
        """Return the time spent in each stage so far."""
        self.enter(self._stage)
        return Times(**self._spent)
