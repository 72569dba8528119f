"""Decides what becomes of a server's processes. Starts nothing, signals nobody, reads no clock.

Events come in (a child exited, the server is ready, somebody pressed Ctrl-C, time passed); orders
come out (say this, send that signal, end with this code). `tools.watch` carries them out. The laws:

- a child that exits before it was told to is a failure, whatever its exit code: the others are
  stopped, and the first cause is the one that is told;
- a drain stops the children one after the other, those who take requests first, so that whoever
  still streams keeps the processes it needs;
- who does not stop in time is killed; a second Ctrl-C kills at once;
- the end comes when every child is gone, and only then.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

STOP_S = 5.0
"""After a failure, how long the others have to leave by themselves: to tell their clients."""
UNUSED_STOP_S = 1.0
"""The same before the server was ready: nobody waits for an answer."""
SAME_WISH_S = 0.5
"""Signals so close together are one wish: `timeout` and service managers may send it twice."""
GRACE_S = 5.0
"""In a drain, what a child has on top of the time its open requests may take."""

OK, FAILED = 0, 1


class Phase(Enum):
    STARTING = auto()  # children run; not ready yet; bounded by start_timeout_s
    SERVING = auto()  # ready; ends by a failure or a signal
    DRAINING = auto()  # children are asked to finish, one after the other
    STOPPING = auto()  # all children were told to go, after a failure
    KILLING = auto()  # no more patience
    ENDED = auto()  # no child is left


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended: `code` as of wait(2), negative for a signal; the last error it printed."""

    child: str
    code: int
    last_words: str = ""

    @property
    def cause(self) -> str:
        how = f"exited with code {self.code}"
        if self.code < 0:
            how = f"was killed by {signal.Signals(-self.code).name}"
        return f"{self.child} {how}" + (f": {self.last_words}" if self.last_words else "")


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the person at the terminal; on stderr if it is a failure."""

    text: str
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """`signal` to `child`; SIGKILL goes to everything that the child has started, too."""

    child: str
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class End:
    """All is over; leave with this code."""

    code: int


Order = Say | Send | End


class Supervisor:
    """The state of one server. `now` is in seconds of any steady clock; `deadline` says when to
    tick.

    children   in the order in which a drain stops them
    """

    def __init__(
        self, children: Sequence[str], now: float, *, start_timeout_s: float, drain_s: float
    ) -> None:
        self.phase = Phase.STARTING
        self.alive = list(children)
        self.deadline: float | None = now + start_timeout_s
        self._start_timeout_s = start_timeout_s
        self._drain_s = drain_s
        self._told: set[str] = set()
        self._code = OK
        self._wished_at = float("-inf")

    def ready(self) -> list[Order]:
        """The server answers that it is ready."""
        if self.phase is Phase.STARTING:
            self.phase, self.deadline = Phase.SERVING, None
        return []

    def exited(self, exit: Exit, now: float) -> list[Order]:
        """A child is gone. Each child exits once."""
        self.alive.remove(exit.child)
        orders: list[Order] = []
        if self.phase in (Phase.STARTING, Phase.SERVING):
            orders = self._fail(exit.cause, now)
        elif self.phase is Phase.DRAINING:
            orders = self._left(exit) + self._drain_next(now)
        return orders + self._end()

    def interrupted(self, by: signal.Signals, now: float) -> list[Order]:
        """Somebody wants us gone: politely the first time, at once the second time."""
        if now - self._wished_at < SAME_WISH_S:
            return []
        self._wished_at = now
        if self.phase in (Phase.STARTING, Phase.SERVING):
            self.phase = Phase.DRAINING
            again = "; Ctrl-C again stops at once" if by is signal.SIGINT else ""
            return [Say(f"stopping: open requests may finish{again}"), *self._drain_next(now)]
        if self.phase in (Phase.DRAINING, Phase.STOPPING):
            self._code = self._code or 128 + by
            return [Say("stopping at once", is_failure=True), *self._kill()]
        return []

    def tick(self, now: float) -> list[Order]:
        """Time passed; call at `deadline`."""
        if self.deadline is None or now < self.deadline:
            return []
        if self.phase is Phase.STARTING:
            return self._fail(f"not ready after {self._start_timeout_s:g} s", now)
        if self.phase is Phase.STOPPING:  # the cause has been told; this is no news
            return self._kill()
        late = [child for child in self.alive if child in self._told]
        self._code = FAILED
        words = f"{' and '.join(late)} did not stop in time and will be killed"
        return [Say(words, is_failure=True), *self._kill()]

    def _fail(self, cause: str, now: float) -> list[Order]:
        patience_s = UNUSED_STOP_S if self.phase is Phase.STARTING else STOP_S
        self.phase, self.deadline, self._code = Phase.STOPPING, now + patience_s, FAILED
        self._told.update(self.alive)
        stops = [Send(child, signal.SIGTERM) for child in self.alive]
        return [Say(cause, is_failure=True), *stops]

    def _left(self, exit: Exit) -> list[Order]:
        """In a drain: told to go and went, or broke on the way out."""
        if exit.child in self._told and exit.code in (OK, -signal.SIGTERM):
            return []
        self._code = FAILED
        return [Say(f"while stopping, {exit.cause}", is_failure=True)]

    def _drain_next(self, now: float) -> list[Order]:
        if not self.alive or self.alive[0] in self._told:
            return []
        self._told.add(self.alive[0])
        self.deadline = now + self._drain_s + GRACE_S
        return [Send(self.alive[0], signal.SIGTERM)]

    def _kill(self) -> list[Order]:
        self.phase, self.deadline = Phase.KILLING, None
        return [Send(child, signal.SIGKILL) for child in self.alive]

    def _end(self) -> list[Order]:
        if self.alive:
            return []
        self.phase, self.deadline = Phase.ENDED, None
        return [End(self._code)]
