"""The states of a batch, as a table. A missing row is an illegal move."""

from __future__ import annotations

from enum import StrEnum, auto


class BatchStatus(StrEnum):
    """The status of a batch in OpenAI's API."""

    VALIDATING = "validating"  # its lines are checked; owns two hidden output files
    IN_PROGRESS = "in_progress"  # its lines are computed
    FINALIZING = "finalizing"  # all lines have results; its output files become visible
    COMPLETED = "completed"  # final
    FAILED = "failed"  # final: a line is malformed, and none was computed
    EXPIRED = "expired"  # final: its window ended, and the lines left got errors as results
    CANCELLING = "cancelling"  # no line is started any more; those being computed are aborted
    CANCELLED = "cancelled"  # final: the results so far are visible


class BatchEvent(StrEnum):
    VALID = auto()  # all lines are well-formed
    INVALID = auto()  # one is not, or the input file is gone
    ALL_DONE = auto()  # each line has a result
    WINDOW_OVER = auto()  # the window has ended, and each line has a result
    CANCEL = auto()  # the owner asked
    PUBLISHED = auto()  # the output files are visible


_S, _E = BatchStatus, BatchEvent
NEXT_STATUS: dict[tuple[BatchStatus, BatchEvent], BatchStatus] = {
    (_S.VALIDATING, _E.VALID): _S.IN_PROGRESS,
    (_S.VALIDATING, _E.INVALID): _S.FAILED,
    (_S.VALIDATING, _E.CANCEL): _S.CANCELLING,
    (_S.IN_PROGRESS, _E.ALL_DONE): _S.FINALIZING,
    (_S.IN_PROGRESS, _E.WINDOW_OVER): _S.EXPIRED,
    (_S.IN_PROGRESS, _E.CANCEL): _S.CANCELLING,
    (_S.FINALIZING, _E.PUBLISHED): _S.COMPLETED,
    (_S.CANCELLING, _E.PUBLISHED): _S.CANCELLED,
}
FINAL = frozenset((_S.COMPLETED, _S.FAILED, _S.EXPIRED, _S.CANCELLED))
"""Statuses that never change. A batch with another one is open."""


class IllegalBatchMove(Exception):
    """An event does not fit the status of a batch, for example because it was cancelled."""

    def __init__(self, status: BatchStatus, event: BatchEvent) -> None:
        super().__init__(f"a batch that is {status} cannot handle {event}")


def next_status(status: BatchStatus, event: BatchEvent) -> BatchStatus:
    """Return the status after an event. Raises IllegalBatchMove if the table has no such row."""
    try:
        return NEXT_STATUS[status, event]
    except KeyError:
        raise IllegalBatchMove(status, event) from None
