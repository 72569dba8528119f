"""Where a request's time goes: how long it was in each of its stages. Pure.

A watch turns when its request moves to another phase (request.STAGES) and when the first token is
there, so it costs nothing per step and per token.
"""

from __future__ import annotations

from enum import Enum

from protocol.messages import Times


class RequestStage(Enum):
    """Its value is the field of Times that grows meanwhile."""

    GRAMMAR = "grammar_s"
    QUEUE = "queued_s"
    FETCH = "fetching_s"
    PREFILL = "prefill_s"
    DECODE = "decode_s"
    PREEMPTED = "preempted_s"


class EngineClock:
    """now: seconds of a steady clock, as the engine was last told; one for all its requests."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0


class StageTimer:
    """One request's, from its arrival on."""

    __slots__ = ("_clock", "_has_spoken", "_since", "_spent", "_stage")

    def __init__(self, clock: EngineClock) -> None:
        self._clock = clock
        self._since = clock.now
        self._stage: RequestStage | None = RequestStage.GRAMMAR
        self._spent: dict[str, float] = {}
        self._has_spoken = False

    def enter(self, stage: RequestStage | None) -> None:
        """None: it is over. What is computed once the first token is there is no prefill any more,
        even where tokens are computed again."""
        now = self._clock.now
        if self._stage is not None and now > self._since:
            name = self._stage.value
            self._spent[name] = self._spent.get(name, 0.0) + now - self._since
        self._since = now
        is_decoding = stage is RequestStage.PREFILL and self._has_spoken
        self._stage = RequestStage.DECODE if is_decoding else stage

    def speak(self) -> None:
        """The first token is there."""
        self._has_spoken = True
        self.enter(self._stage)

    @property
    def stage(self) -> str:
        """Which of the Times grows now, without its unit; "" when it is over."""
        return "" if self._stage is None else self._stage.value.removesuffix("_s")

    def times(self) -> Times:
        """So far."""
        self.enter(self._stage)
        return Times(**self._spent)
