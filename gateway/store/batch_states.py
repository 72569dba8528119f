"""The states of a batch, as a table."""

from __future__ import annotations

from enum import StrEnum, auto

from protocol.machine import Machine


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
BATCH_MACHINE = Machine(
    "batch",
    starts=(_S.VALIDATING,),
    rows={
        (_S.VALIDATING, _E.VALID): _S.IN_PROGRESS,
        (_S.VALIDATING, _E.INVALID): _S.FAILED,
        (_S.VALIDATING, _E.CANCEL): _S.CANCELLING,
        (_S.IN_PROGRESS, _E.ALL_DONE): _S.FINALIZING,
        (_S.IN_PROGRESS, _E.WINDOW_OVER): _S.EXPIRED,
        (_S.IN_PROGRESS, _E.CANCEL): _S.CANCELLING,
        (_S.FINALIZING, _E.PUBLISHED): _S.COMPLETED,
        (_S.CANCELLING, _E.PUBLISHED): _S.CANCELLED,
    },
    # The status is in a file that several processes share. Another one may have cancelled the
    # batch, or have continued it while the lease of this one was over.
    ignores=dict.fromkeys(BatchStatus, BatchEvent),
)
FINAL = BATCH_MACHINE.final
"""Statuses that never change. A batch with another one is open."""


class CannotCancel(Exception):
    """A batch cannot be cancelled, because it has ended or is about to."""

    def __init__(self, status: BatchStatus) -> None:
        super().__init__(f"a batch that is {status} cannot be cancelled")
