"""The result of one fuzz target: what was sent to a process, and what the process counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

FLAT_KIB = 64 << 10
"""Most memory that a process may gain: pools and caches fill up once. A leak of 100 bytes a message
exceeds it after 700,000 messages."""

PATIENCE_S = 60.0
"""A process that does not answer within this time is taken to hang."""


@dataclass
class Outcome:
    """The counts of one target.

    malformed    messages sent that the receiver has to refuse
    counted      messages that the receiver has counted as refused. For `kv_reader`: failed
                 transfers; for `worker_engine`: workers that ended with an error; for `bodies`:
                 answers with an error status, which are its `malformed` as well
    notes        further counts for the table, such as answers by status
    """

    target: str
    sent: int = 0
    malformed: int = 0
    counted: int = 0
    seconds: float = 0.0
    grown_kib: int = 0
    notes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        notes = ", ".join(f"{count:,} {what}" for what, count in sorted(self.notes.items()))
        return (
            f"{self.target:<24} {self.sent:>9,} sent {self.malformed:>9,} malformed "
            f"{self.counted:>9,} counted {self.seconds:>7.1f} s {self.grown_kib / 1024:>+6.1f} MiB"
            + (f"  ({notes})" if notes else "")
        )


@contextmanager
def watched(outcome: Outcome, pid: Callable[[], int]) -> Iterator[Callable[[], None]]:
    """Measure the duration of the `with` block and the growth of the process `pid()`.

    Yields a function to call when the process is warm; growth before that does not count. Raises
    AssertionError if the process has grown by FLAT_KIB, or if another process has replaced it.
    """
    began, first = monotonic(), pid()
    before = [anonymous_kib(first)]
    yield lambda: before.append(anonymous_kib(first))
    assert pid() == first, f"{outcome.target}: its process is another one now"
    outcome.seconds = monotonic() - began
    outcome.grown_kib = anonymous_kib(first) - before[-1]
    assert outcome.grown_kib < FLAT_KIB, f"{outcome.target} has grown: {outcome}"


def anonymous_kib(pid: int) -> int:
    """Return the resident memory of a process in KiB, without files and shared memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
