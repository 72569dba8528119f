"""The times at which a request reached each stage.

`record.py` builds one record from the timeline and the choices. Metrics, the access log, traces and
the `timings` of a response are all made from that record, so they agree. The first token is the
only one whose time is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

from gateway.prompt.render import RenderedPrompt
from protocol.engine.timeline import ClientTimes


class TimelineMoment(Enum):
    STARTED = "started"  # the request's headers were read
    SENT = "sent"  # the choices were sent to the engine
    ACCEPTED = "accepted"  # the engine has accepted all choices
    FIRST_TOKEN = "first_token"  # the engine has sent a token of any choice
    ANSWERED = "answered"  # all choices have ended, for any reason
    ENDED = "ended"  # the response was sent, or the client disconnected


class Timeline:
    """The times at which a request reached each `TimelineMoment`. STARTED is the creation of this
    object."""

    __slots__ = (
        "_at",
        "_unread_s",
        "_unread_since",
        "image_s",
        "load_s",
        "started_ns",
        "template_s",
        "tokenize_s",
    )

    def __init__(self) -> None:
        self._at = {TimelineMoment.STARTED: time.monotonic()}
        #: Wall-clock time of the start, in nanoseconds since 1970.
        self.started_ns = time.time_ns()
        #: Time spent rendering templates and tokenizing.
        self.tokenize_s = 0.0
        #: The part of `tokenize_s` spent rendering templates.
        self.template_s = 0.0
        #: The part of `tokenize_s` spent loading and preprocessing images.
        self.image_s = 0.0
        #: Time spent waiting until the model was loaded.
        self.load_s = 0.0
        self._unread_s = 0.0
        #: Since when output waits because the client does not read; None: none does.
        self._unread_since: float | None = None

    def note(self, moment: TimelineMoment) -> None:
        """Record that the request has reached `moment` now, unless it has reached it before."""
        self._at.setdefault(moment, time.monotonic())

    def reopen(self) -> None:
        """Forget that all choices have ended, because they are sent again."""
        self._at.pop(TimelineMoment.ANSWERED, None)

    def has(self, moment: TimelineMoment) -> bool:
        return moment in self._at

    def at_s(self, moment: TimelineMoment) -> float | None:
        """Return the seconds from the start to `moment`; None if it has not been reached."""
        at = self._at.get(moment)
        return None if at is None else at - self._at[TimelineMoment.STARTED]

    @property
    def now_s(self) -> float:
        """Seconds since the start; after the end, the seconds from the start to the end."""
        ended_s = self.at_s(TimelineMoment.ENDED)
        return time.monotonic() - self._at[TimelineMoment.STARTED] if ended_s is None else ended_s

    def note_prompts(self, prompts: Sequence[RenderedPrompt]) -> None:
        """Record which parts of `tokenize_s` other work took than the tokenizer's."""
        self.template_s = sum(prompt.template_s for prompt in prompts)
        self.image_s = sum(prompt.images.times.total_s for prompt in prompts)

    def note_unread(self) -> None:
        """Record that output waits from now on, because the client does not read."""
        if self._unread_since is None:
            self._unread_since = time.monotonic()

    def note_read(self) -> None:
        """Record that the client has read all output that waited."""
        self._unread_s, self._unread_since = self.unread_s, None

    @property
    def unread_s(self) -> float:
        """Time in which output waited because the client did not read."""
        if self._unread_since is None:
            return self._unread_s
        until = self._at.get(TimelineMoment.ENDED, time.monotonic())
        return self._unread_s + max(0.0, until - self._unread_since)

    def client_times(self) -> ClientTimes:
        """Return the gateway's part of the request's timeline, so far."""
        return ClientTimes(
            took_s=self.now_s,
            arrived_ago_s=time.monotonic() - self._at[TimelineMoment.STARTED],
            load_s=self.load_s,
            template_s=self.template_s,
            image_s=self.image_s,
            tokenize_s=self.tokenize_s - self.template_s - self.image_s,
            sent_s=self.at_s(TimelineMoment.SENT),
            first_token_s=self.at_s(TimelineMoment.FIRST_TOKEN),
            answered_s=self.at_s(TimelineMoment.ANSWERED),
            ended_s=self.at_s(TimelineMoment.ENDED),
            unread_s=self.unread_s,
        )

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        """Add the time spent inside the `with` block to `tokenize_s`."""
        started_at = time.monotonic()
        try:
            yield
        finally:
            self.tokenize_s += time.monotonic() - started_at
