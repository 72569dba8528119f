"""Finds markers in a stream of deltas of any length. All held-back text is held here.

The markers found depend on the whole text only, however it is cut: they are those of the regular
expression `marker|marker|...` read from the left. So the earliest start wins, and of several
markers at one start the first in the list. Text is released as soon as it can no longer be part of
a marker, and never more than the longest marker is held.

The search is the automaton of Aho and Corasick over characters, so its time is linear in the text.
A marker that is found while an earlier, longer one could still complete has to wait for it. The few
characters read in the meantime are then read again, at most the longest marker's length each time.

Text may be read as `part`: characters that count inside a marker only, and are dropped elsewhere.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

NONE = -1


class MarkerText(msgspec.Struct, frozen=True, gc=False):
    """Text outside all markers."""

    text: str


class Marker(msgspec.Struct, frozen=True, gc=False):
    """A complete marker."""

    text: str


class ScannerState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of a `Scanner`.

    held   text that has been read but not released
    parts  (start, end) in `held` of text that counts inside a marker only
    """

    held: str
    parts: list[tuple[int, int]] = []


class MarkerSet:
    """The automaton: compiled once, never changed, shared by any number of scanners.

    Nodes are numbered; node 0 is the empty prefix.

    children[n]  character -> node of the prefix that is one character longer
    fail[n]      node of the longest proper suffix of n that is also a prefix
    depth[n]     length of the prefix
    found[n]     index in `markers` of the longest marker that ends here, or NONE
    """

    def __init__(self, markers: Sequence[str]) -> None:
        if not markers or not all(markers):
            raise ValueError("markers must be strings of at least one character")
        self.markers = tuple(markers)
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found = [NONE]
        for index, marker in enumerate(markers):
            self._insert(marker, index)
        self.fail = [0] * len(self.children)
        self._link()
        self.opening = re.compile("[" + "".join(re.escape(c) for c in self.children[0]) + "]")

    def _insert(self, marker: str, index: int) -> None:
        """Add a marker. One that starts with an earlier marker of the list can never win and is
        left out.

        So on every path a deeper marker beats a shallower one.
        """
        node = 0
        for char in marker:
            if self.found[node] != NONE:
                return
            if char not in self.children[node]:
                self.children[node][char] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[node] + 1)
                self.found.append(NONE)
            node = self.children[node][char]
        if self.found[node] == NONE:
            self.found[node] = index

    def _link(self) -> None:
        """Compute `fail` breadth first, so that shorter prefixes are linked before longer ones."""
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            if self.found[node] == NONE:
                self.found[node] = self.found[self.fail[node]]
            for char, child in self.children[node].items():
                suffix = self.fail[node]
                while suffix and char not in self.children[suffix]:
                    suffix = self.fail[suffix]
                self.fail[child] = self.children[suffix].get(char, 0)
                queue.append(child)


class Scanner:
    """One stream's position in a MarkerSet. `held` text has been read but not released."""

    __slots__ = ("_best", "_held", "_node", "_parts", "_set", "_start")

    def __init__(self, markers: MarkerSet, state: ScannerState | None = None) -> None:
        self._set = markers
        self._parts: list[tuple[int, int]] = []  # in `held`: text in a marker alone
        self._reset("")
        if state is not None:  # the automaton's position is a function of the held text
            self.next(state.held)
            self._parts = list(state.parts)

    def _reset(self, held: str) -> None:
        self._held = held
        self._parts = []
        self._node = 0
        self._best = NONE  # a complete marker that waits for an earlier or better one
        self._start = 0  # where it starts, in `held`

    def state(self) -> ScannerState:
        return ScannerState(self._held, list(self._parts))

    def lets_through(self, delta: str) -> bool:
        """Return whether nothing is held and no marker starts in `delta`, so it can be released
        unread.
        """
        return not self._held and self._set.opening.search(delta) is None

    def push(self, delta: str) -> list[MarkerText | Marker]:
        """Return all text and markers that `delta` makes certain."""
        return list(self._pieces(delta, final=False))

    def finish(self) -> list[MarkerText | Marker]:
        """Return the held text: no more text follows."""
        return list(self._pieces("", final=True))

    def _pieces(self, delta: str, *, final: bool) -> Iterator[MarkerText | Marker]:
        while True:
            text, marker, rest = self.next(delta, final=final)
            if text:
                yield MarkerText(text)
            if marker is None:
                return
            yield Marker(marker)
            delta = rest

    def next(
        self, delta: str, *, final: bool = False, part: bool = False
    ) -> tuple[str, str | None, str]:
        """Read up to the first marker. Return (released text, marker or None, unread text).

        After a marker nothing is held, and the caller decides about the unread text.
        """
        text = self._held + delta
        if part:
            self._parts.append((len(self._held), len(text)))
        end = self._read(text, len(self._held))
        if end == NONE and not final:
            # An uncertain best marker begins no earlier than what is alive, so it is kept too.
            at = len(text) - self._set.depth[self._node]
            self._held = text[at:]
            self._start -= at
            return self._release(text, at), None, ""
        if self._best == NONE:
            released = self._release(text, len(text))
            self._reset("")
            return released, None, ""
        marker, start = self._set.markers[self._best], self._start
        released = self._release(text, start)
        self._reset("")
        return released, marker, text[start + len(marker) :]

    def _release(self, text: str, end: int) -> str:
        """Return `text` up to `end` without the parts that count in a marker only. The rest
        stays held.
        """
        if not self._parts:
            return text[:end]
        kept, at = [], 0
        for start, stop in self._parts:
            kept.append(text[at : min(start, end)])
            at = min(stop, end)
        kept.append(text[at:end])
        self._parts = [(max(a - end, 0), b - end) for a, b in self._parts if b > end]
        return "".join(kept)

    def _read(self, text: str, position: int) -> int:
        """Walk the automaton from `position`. Return where the best marker became certain, or
        NONE.
        """
        automaton = self._set
        children, fail, depth, found = (
            automaton.children,
            automaton.fail,
            automaton.depth,
            automaton.found,
        )
        markers, node, end = automaton.markers, self._node, len(text)
        while position < end:
            if node == 0:
                opening = automaton.opening.search(text, position)
                if opening is None:
                    position = end
                    break
                position = opening.start()
            char = text[position]
            position += 1
            while node and char not in children[node]:
                node = fail[node]
            node = children[node].get(char, 0)
            if found[node] != NONE:
                start = position - len(markers[found[node]])
                if self._best == NONE or start <= self._start:
                    self._best, self._start = found[node], start
            if self._best != NONE and self._is_certain(node, position - depth[node]):
                self._node = node
                return position
        self._node = node
        return NONE

    def _is_certain(self, node: int, live_start: int) -> bool:
        """Return whether no better marker can still complete: all others in progress start
        later, or the one at the same start is complete and cannot grow into a better one.
        """
        if live_start > self._start:
            return True
        return live_start == self._start and not self._set.children[node]


def match_end(pattern: re.Pattern[str], text: str, position: int = 0) -> int:
    """Return the end of the match of `pattern` at `position`.

    The pattern must match everywhere, if only the empty string.
    """
    return pattern.match(text, position).end()  # type: ignore[union-attr]  # see above
