"""Finds markers in a text that arrives in deltas of any length.

The result does not depend on how the text is cut. The markers found are those that the regular
expression `marker|marker|...` matches from left to right: the marker that starts first wins. If
several markers start at the same place, the first one in the list wins. Text that may be part of a
marker is held back until that is decided. The held text is never longer than the longest marker.

The search uses the Aho-Corasick automaton over characters, so its time is linear in the length of
the text. A marker that was found has to wait while a better one may still complete: one that starts
earlier, or a longer one at the same place. If the found marker wins in the end, the characters
after it are read a second time. There are never more of these than the longest marker has.

If no text is held, a regular expression finds the first complete marker of a long delta. The
automaton then reads only the end of the delta, where a marker may be incomplete.

Text that is passed to `Scanner.next` with `part` set is only searched for markers: its characters
outside all markers are dropped.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

NONE = -1
"""Stands for no marker and for no position."""


class MarkerText(msgspec.Struct, frozen=True, gc=False):
    """Text outside all markers."""

    text: str


class Marker(msgspec.Struct, frozen=True, gc=False):
    """A complete marker that was found."""

    text: str


class ScannerState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a `Scanner`."""

    #: Text that has been read but not released.
    held: str
    #: (start, end) of each piece of `held` that is dropped unless it is inside a marker.
    parts: list[tuple[int, int]] = []


class MarkerSet:
    """The automaton of a set of markers. It is immutable and shared by any number of scanners. The
    constructor raises ValueError if there are no markers, or if one is empty.

    Each node stands for a prefix of a marker. Nodes are numbered; node 0 is the empty prefix. Each
    of these lists has one item per node n:

    children  character -> node of the prefix that is one character longer
    fail      node of the longest proper suffix of n's prefix that is itself a prefix of a marker
    depth     length of n's prefix
    found     index in `markers` of the longest marker that is a suffix of n's prefix, or NONE
    """

    def __init__(self, markers: Sequence[str]) -> None:
        if not markers or not all(markers):
            raise ValueError("markers must be strings of at least one character")
        self.markers = tuple(markers)
        self.longest = max(map(len, markers))
        self.indices: dict[str, int] = {}  # marker -> its index, without markers that never win
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found = [NONE]
        for index, marker in enumerate(markers):
            self._insert(marker, index)
        self.fail = [0] * len(self.children)
        self._link()
        self.opening = re.compile("[" + "".join(re.escape(c) for c in self.children[0]) + "]")

    def _insert(self, marker: str, index: int) -> None:
        """Add a marker, unless it begins with an earlier marker of the list: it could then never
        win. So if two added markers match at the same place, the longer one wins."""
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
            self.found[node] = self.indices[marker] = index

    @cached_property
    def complete(self) -> re.Pattern[str]:
        """A pattern of all markers. The longest one that matches at a place wins."""
        longest_first = sorted(self.indices, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def _link(self) -> None:
        """Compute `fail` breadth first, because it needs the values of all shorter prefixes."""
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
    """Finds the markers of a MarkerSet in one text that arrives in deltas."""

    __slots__ = ("_best", "_held", "_node", "_parts", "_set", "_start")

    def __init__(self, markers: MarkerSet, state: ScannerState | None = None) -> None:
        self._set = markers
        self._parts: list[tuple[int, int]]  # as in ScannerState
        self._reset()
        if state is not None and state.held:
            self.next(state.held)  # restores the automaton's position
            self._parts = list(state.parts)

    def _reset(self) -> None:
        """Return to the initial state."""
        self._held = ""
        self._parts = []
        self._node = 0
        self._best = NONE  # a complete marker, unless an earlier or longer one completes
        self._start = 0  # where `_best` starts in `_held`

    def state(self) -> ScannerState:
        return ScannerState(self._held, list(self._parts))

    def lets_through(self, delta: str) -> bool:
        """Return whether `delta` can be released as it is: nothing is held, and no character in
        `delta` starts a marker."""
        return not self._held and self._set.opening.search(delta) is None

    def push(self, delta: str) -> list[MarkerText | Marker]:
        """Return the text and the markers that are certain after `delta`."""
        return list(self._pieces(delta, final=False))

    def finish(self) -> list[MarkerText | Marker]:
        """Return the held text and the markers in it, because no more text follows."""
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
        """Read `delta` up to the first marker. Return (released text, marker or None, unread text).

        After a marker nothing is held. The caller may pass the unread text to this method again.

        final  no more text follows, so nothing is held back
        part   the characters of `delta` are dropped unless they are inside a marker
        """
        if not part and self.lets_through(delta):  # most deltas
            return delta, None, ""
        text = self._held + delta
        if part:
            self._parts.append((len(self._held), len(text)))
        end = self._read(text, len(self._held))
        if end == NONE and not final:
            # The longest prefix of a marker at the end of `text` is held. A marker that waits in
            # `_best` does not start before that prefix, so it is held too.
            at = len(text) - self._set.depth[self._node]
            self._held = text[at:]
            self._start -= at
            return self._release(text, at) if self._parts else text[:at], None, ""
        if self._best == NONE:
            released = self._release(text, len(text))
            self._reset()
            return released, None, ""
        marker, start = self._set.markers[self._best], self._start
        released = self._release(text, start) if self._parts else text[:start]
        self._reset()
        return released, marker, text[start + len(marker) :]

    def _release(self, text: str, end: int) -> str:
        """Return the text up to `end`, which is outside all markers, without the pieces to drop.
        The rest of `_parts` is kept for the held text."""
        kept, at = [], 0
        for start, stop in self._parts:
            kept.append(text[at : min(start, end)])
            at = min(stop, end)
        kept.append(text[at:end])
        self._parts = [(max(a - end, 0), b - end) for a, b in self._parts if b > end]
        return "".join(kept)

    def _read(self, text: str, position: int) -> int:
        """Read `text` from `position`. Return the position at which the best marker is certain.
        Return NONE if no marker is certain at the end of the text."""
        automaton = self._set
        children, fail, depth, found = (
            automaton.children,
            automaton.fail,
            automaton.depth,
            automaton.found,
        )
        markers, node, end = automaton.markers, self._node, len(text)
        last = end - automaton.longest  # a marker that starts here or earlier is not cut off
        if last >= 0 and not self._held:
            whole = automaton.complete.search(text)
            if whole and whole.start() <= last:
                self._best, self._start = automaton.indices[whole[0]], whole.start()
                return whole.end()
            position = last + 1
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
        """Return whether no better marker than the best one can still complete.

        live_start  where the longest prefix of a marker that ends here starts; a marker that is not
                    complete yet cannot start before it

        The best marker is certain if `live_start` is after its own start. It is also certain if
        both are equal and the prefix cannot become a longer marker.
        """
        if live_start > self._start:
            return True
        return live_start == self._start and not self._set.children[node]


def match_end(pattern: re.Pattern[str], text: str, position: int = 0) -> int:
    """Return the end of the match of `pattern` at `position`. The pattern must match at every
    position, perhaps an empty string."""
    return pattern.match(text, position).end()  # type: ignore[union-attr]  # it always matches
