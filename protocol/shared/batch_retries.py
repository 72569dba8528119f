"""Decides whether the answer to a line is its result, or whether the line is sent again.

Three kinds of trouble pass:

- No server answers. The line was not sent, so it can wait as long as the run does.
- The server refuses the line for now (429, 503). It says when to come back.
- The connection or the engine was lost while the line was computed. The line itself may be the
  cause, so such tries are counted.

The run, not a line, gives up if no line was answered for a long time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

import msgspec

from protocol.shared.batches import BatchFailure, BatchResponse

MAX_TRIES = 5
"""Number of times that a line is sent although the connection or the engine was lost each time."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 15.0
"""The pause after the first failure in a row, which doubles with each further one."""
MAX_RETRY_AFTER_S = 60.0
LOST_CODES = ("engine_lost", "step_failed")
"""Codes of errors of requests that were being computed."""
PASSING = (
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
"""Statuses after which a line is sent again."""

Trouble = Literal["unreachable", "refused", "lost"]


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """The outcome of sending a line once: a response, or the reason there is none."""

    #: The server's answer; None if it sent none, or not all of it.
    response: BatchResponse | None = None
    #: The header Retry-After in seconds; None if it is absent or is a date.
    retry_after_s: float | None = None
    #: Whether the server may have received the request.
    was_sent: bool = True
    #: Why there is no answer.
    message: str = ""

    @property
    def trouble(self) -> Trouble | None:
        """Why the line must be sent again; None if the response is its result."""
        if self.response is None:
            return "lost" if self.was_sent else "unreachable"
        if self.response.status_code not in PASSING:
            return None
        return "lost" if _error_code(self.response.body) in LOST_CODES else "refused"


class _Error(msgspec.Struct):
    code: object = None


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None


def _error_code(body: msgspec.Raw) -> object:
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        return None
    return error.code if error is not None else None


class RetryPolicy:
    """Decides whether and when one line of a batch is sent again after a failure."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._num_lost = 0
        self._num_in_a_row = 0

    def pause_after(self, outcome: LineOutcome) -> float | None:
        """Return the seconds after which the line is sent again; None if it is not, because the
        outcome is its result."""
        if outcome.trouble is None:
            return None
        if outcome.trouble == "lost":
            self._num_lost += 1
            if self._num_lost >= MAX_TRIES:
                return None
        self._num_in_a_row += 1
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * float(1 << min(self._num_in_a_row - 1, 16)))
        least_s = min(MAX_RETRY_AFTER_S, outcome.retry_after_s or 0.0)
        return max(least_s, pause_s) * self._dice.uniform(1.0, 1.25)


def failure_of(outcome: LineOutcome) -> BatchFailure:
    """Return the error of a line that got no answer in MAX_TRIES tries."""
    return BatchFailure("no_answer", f"no answer in {MAX_TRIES} tries; the last: {outcome.message}")
