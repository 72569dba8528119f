"""What has happened to one request, and when: the log of it, to which each station adds its own.

It is the only source of what is told of a request besides its answer: `record.py` makes one record
of it, and metrics, the access log, traces and the `timings` of a response are all made of that. So
they cannot differ, and what is summed over requests is the total. Each moment comes once at most
(the first counts), and none comes with every token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum


class TimelineMoment(Enum):
    BEGAN = "began"  # its head has been read
    ASKED = "asked"  # the engine is asked for its answer
    ACCEPTED = "accepted"  # by the engine, all of it
    FIRST_TOKEN = "first_token"  # of any choice
    ANSWERED = "answered"  # nothing more will be said: its answer is over, whichever way
    ENDED = "ended"  # all is sent, or the client is gone


class Timeline:
    """tokenize_s  how long its prompts took to become tokens, templates included
    began_ns    on the clock on the wall, since 1970
    """

    __slots__ = ("_at", "began_ns", "tokenize_s")

    def __init__(self) -> None:
        self._at = {TimelineMoment.BEGAN: time.monotonic()}
        self.began_ns = time.time_ns()
        self.tokenize_s = 0.0

    def note(self, moment: TimelineMoment) -> None:
        self._at.setdefault(moment, time.monotonic())

    def has(self, moment: TimelineMoment) -> bool:
        return moment in self._at

    def at_s(self, moment: TimelineMoment) -> float | None:
        """Since it began; None where it has not come."""
        at = self._at.get(moment)
        return None if at is None else at - self._at[TimelineMoment.BEGAN]

    @property
    def now_s(self) -> float:
        """Since it began, until its end."""
        ended_s = self.at_s(TimelineMoment.ENDED)
        return time.monotonic() - self._at[TimelineMoment.BEGAN] if ended_s is None else ended_s

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.tokenize_s += time.monotonic() - began
