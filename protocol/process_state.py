"""What the kernel tells of a process of this machine."""

from __future__ import annotations

from pathlib import Path

STOPPED = "T"
"""By a signal; "t", which a debugger's look makes of it for a moment, is none of ours."""


def is_stopped(pid: int) -> bool:
    """Whether it is stopped (SIGSTOP, SIGTSTP) and computes nothing until somebody lets it go on.
    False where nobody can tell, and for one that is gone."""
    return _state(pid) == STOPPED


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
