"""Stage timer: measures how long a request spends in each stage of its life.

The stage changes only when the request changes its phase (request.STAGES), at its first token, and
when it starts or ends to wait for an image. So timing costs nothing per step or token.
"""

from __future__ import annotations

from enum import Enum
from typing import cast

from protocol.engine.timeline import Stage
from protocol.engine.usage import Times


class RequestStage(Enum):
    """A stage of a request's life. The value is the field of `Times` for the stage."""

    GRAMMAR = "grammar_s"
    QUEUE = "queued_s"
    FETCH = "fetching_s"
    ENCODING = "encoding_s"
    PREFILL = "prefill_s"
    DECODE = "decode_s"
    PREEMPTED = "preempted_s"

    @property
    def stage(self) -> Stage:
        """The stage as a word: "grammar", "queued", ..."""
        return cast(Stage, self.value.removesuffix("_s"))


MAX_SPANS = 256
"""Most changes of the stage of one request that are recorded with their times."""


class EngineClock:
    """The engine's current time, in seconds of a steady clock. All requests share one object."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0


class StageTimer:
    """The time that one request has spent in each stage since its arrival."""

    __slots__ = ("_clock", "_has_token", "_since", "_spent", "_stage", "spans")

    def __init__(self, clock: EngineClock) -> None:
        self._clock = clock
        self._since = clock.now
        self._stage: RequestStage | None = RequestStage.GRAMMAR
        self._spent: dict[str, float] = {}
        self._has_token = False
        #: Each stage so far, in order, with the time at which it started; at the end of the request
        #: no stage is added. At most MAX_SPANS.
        self.spans: list[tuple[Stage, float]] = [("grammar", clock.now)]

    def enter(self, stage: RequestStage | None) -> None:
        """Switch to `stage`; None means that the request has ended.

        After the first token, PREFILL counts as DECODE, because the client waits for the next
        token of its answer while a preempted request is recomputed.
        """
        now = self._clock.now
        if self._stage is not None and now > self._since:
            name = self._stage.value
            self._spent[name] = self._spent.get(name, 0.0) + now - self._since
        self._since = now
        is_decoding = stage is RequestStage.PREFILL and self._has_token
        before, self._stage = self._stage, RequestStage.DECODE if is_decoding else stage
        if self._stage is not before and self._stage is not None and len(self.spans) < MAX_SPANS:
            self.spans.append((self._stage.stage, now))

    def note_image_wait(self, *, is_waiting: bool) -> None:
        """Record whether a running request waits for an image."""
        if is_waiting != (self._stage is RequestStage.ENCODING):
            self.enter(RequestStage.ENCODING if is_waiting else RequestStage.PREFILL)

    def on_first_token(self) -> None:
        """Record that the first token was sampled, which starts the stage DECODE."""
        self._has_token = True
        self.enter(self._stage)

    @property
    def stage(self) -> str:
        """The current stage as a word, such as "prefill"; "" if the request has ended."""
        return "" if self._stage is None else self._stage.stage

    @property
    def total_s(self) -> float:
        """Seconds in all stages so far."""
        self.enter(self._stage)
        return sum(self._spent.values())

    @property
    def decode_s(self) -> float:
        """Seconds in the stage DECODE so far."""
        self.enter(self._stage)
        return self._spent.get(RequestStage.DECODE.value, 0.0)

    def times(self) -> Times:
        """Return the time spent in each stage so far."""
        self.enter(self._stage)
        return Times(**self._spent)
