"""Stop strings: the text ends where one of them starts.

If the text contains several stop strings, the one that starts first ends it. If several start at
the same place, the first one in the list wins. The result does not depend on how the text is cut
into deltas. Text that may still become a stop string is held back by `text.markers`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.text.markers import MarkerSet, Scanner, ScannerState

MAX_STOP_STRINGS = 16


class StopState(msgspec.Struct, frozen=True):
    """The state of a `StopMatcher`."""

    scanner: ScannerState
    #: The stop string that ended the text; None if the text has not ended.
    matched: str | None = None


class StopMatcher:
    """Searches for stop strings in the text of one choice.

    stops    the stop strings, compiled once for all choices of a request
    include  the released text contains the stop string itself
    """

    __slots__ = ("_include", "_scanner", "matched")

    def __init__(
        self, stops: MarkerSet, *, include: bool = False, state: StopState | None = None
    ) -> None:
        self._include = include
        self._scanner = Scanner(stops, state.scanner if state else None)
        #: The stop string that ended the text; None if the text has not ended.
        self.matched: str | None = state.matched if state else None

    def state(self) -> StopState:
        return StopState(self._scanner.state(), self.matched)

    def push(self, delta: str) -> str:
        """Return the text that can be released. An end that may start a stop string is held back.

        The call that finds a stop string returns the text before it, and with `include` the stop
        string too. Later calls return "".
        """
        return self._read(delta, final=False)

    def finish(self) -> str:
        """Return the held text, because no more text follows. This may set `matched`."""
        return self._read("", final=True)

    def _read(self, delta: str, *, final: bool) -> str:
        if self.matched is not None:
            return ""
        text, self.matched, _ = self._scanner.next(delta, final=final)
        return text + self.matched if self.matched and self._include else text


def compile_stops(stops: Sequence[str]) -> MarkerSet | None:
    """Return the compiled stop strings; None if there are none.

    The caller has checked the number and the lengths of the strings.
    """
    return MarkerSet(stops) if stops else None
