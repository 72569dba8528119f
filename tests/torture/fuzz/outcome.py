"""What came of one target: how much was sent, and what the process made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

FLAT_KIB = 64 << 10
"""What a process may have grown by: it was new, and pools and caches fill up once. A leak of 100
bytes a message would show in a million of them."""

PATIENCE_S = 60.0
"""Who still has not answered hangs."""


@dataclass
class Outcome:
    """senseless    of what was sent, what the receiver has to refuse
    counted      what it says it has refused
    told         what else is worth knowing: how often what was answered
    """

    target: str
    sent: int = 0
    senseless: int = 0
    counted: int = 0
    seconds: float = 0.0
    grown_kib: int = 0
    told: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        told = ", ".join(f"{count:,} {what}" for what, count in sorted(self.told.items()))
        return (
            f"{self.target:<24} {self.sent:>9,} sent {self.senseless:>9,} senseless "
            f"{self.counted:>9,} counted {self.seconds:>7.1f} s {self.grown_kib / 1024:>+6.1f} MiB"
            + (f"  ({told})" if told else "")
        )


@contextmanager
def watched(outcome: Outcome, pid: Callable[[], int]) -> Iterator[Callable[[], None]]:
    """Time and memory of what is done inside. Call what is given when the process is warm; before,
    it may grow. Raises AssertionError where it is another process at the end, or has grown."""
    began, first = monotonic(), pid()
    before = [anonymous_kib(first)]
    yield lambda: before.append(anonymous_kib(first))
    assert pid() == first, f"{outcome.target}: its process is another one now"
    outcome.seconds = monotonic() - began
    outcome.grown_kib = anonymous_kib(first) - before[-1]
    assert outcome.grown_kib < FLAT_KIB, f"{outcome.target} has grown: {outcome}"


def anonymous_kib(pid: int) -> int:
    """Memory of its own that is resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
