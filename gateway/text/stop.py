"""Stop strings: the text ends where one of them starts.

If there are several, the one that starts first ends the text; of several that start at one place,
the first in the list that completes. This depends on the text only, however it was cut into deltas.
Text that could still become a stop string is held back by `text.markers`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.text.markers import MarkerSet, Scanner, ScannerState

MAX_STOP_STRINGS = 16


class StopState(msgspec.Struct, frozen=True):
    scanner: ScannerState
    matched: str | None = None


class StopMatcher:
    """The stop string search of one choice. After `matched` is set, no text is released.

    stops        compiled once per request, shared by its choices
    include      the stop string itself is part of the text
    """

    __slots__ = ("_include", "_scanner", "matched")

    def __init__(
        self, stops: MarkerSet, *, include: bool = False, state: StopState | None = None
    ) -> None:
        self._include = include
        self._scanner = Scanner(stops, state.scanner if state else None)
        self.matched: str | None = state.matched if state else None

    def state(self) -> StopState:
        return StopState(self._scanner.state(), self.matched)

    def push(self, delta: str) -> str:
        """Return the text that certainly comes before any stop string."""
        return self._read(delta, final=False)

    def finish(self) -> str:
        """Return the held text. It may match: `matched` is set then."""
        return self._read("", final=True)

    def _read(self, delta: str, *, final: bool) -> str:
        if self.matched is not None:
            return ""
        text, self.matched, _ = self._scanner.next(delta, final=final)
        return text + self.matched if self.matched and self._include else text


def compile_stops(stops: Sequence[str]) -> MarkerSet | None:
    """Return the compiled stop strings, or None if there are none. The caller has checked count
    and lengths.
    """
    return MarkerSet(stops) if stops else None
