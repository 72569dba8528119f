"""Runs of positions that a step computes as a whole, because each of them sees all the others.

The positions of an image are such a run in some models. No chunk of a prompt ends inside a run, and
no cached prefix does: the rest of the run could not be computed after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.engine.attachments import Attachment

WholeRuns = tuple[tuple[int, int], ...]
"""(first position, position after the last) of each run of more than one position, in order."""


def whole_runs_of(images: Iterable[Attachment]) -> WholeRuns:
    """Return the runs of images whose positions see each other. The images are in the order of
    their positions."""
    every = (run for image in images for run in image.runs)
    return tuple((first, first + count) for first, count in every if count > 1)


def last_end(runs: Sequence[tuple[int, int]], position: int) -> int:
    """Return the last position, at most `position`, at which a chunk may end."""
    return next((first for first, end in runs if first < position < end), position)


def least_end(runs: Sequence[tuple[int, int]], start: int) -> int:
    """Return the first position after `start` at which a chunk may end."""
    return next((end for first, end in runs if first <= start < end), start + 1)
