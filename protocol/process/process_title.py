"""The title of a process, which `ps`, `top` and systemd show: `tidegate: engine`.

The kernel shows a process's arguments from its memory, so the process replaces the first one there,
the path of the interpreter. The others move and stay visible; the last ones are cut if they no
longer fit. Python has copies of all of them. Without /proc, the title stays as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from protocol.process.process_state import TITLE_PREFIX

PR_SET_NAME = 15  # man 2 prctl
MAX_NAME_BYTES = 15
"""Length of the short name, which the kernel keeps apart from the arguments."""
ARG_START, ARG_END = 45, 46
"""Places of the addresses of the arguments in /proc/self/stat, counted after the name."""


def set_title(role: str) -> None:
    """Show this process as `tidegate: ROLE`."""
    title = f"{TITLE_PREFIX}{role}".encode()
    with contextlib.suppress(OSError, LookupError, ValueError):
        _, *arguments = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[ARG_START]), int(fields[ARG_END])
        if 0 < start < end:  # both are 0 if the process may not see them
            size = end - start
            text = b"\0".join([title, *arguments])[: size - 1]
            ctypes.memmove(start, text.ljust(size, b"\0"), size)
    with contextlib.suppress(AttributeError, OSError):  # a system without prctl
        ctypes.CDLL(None).prctl(PR_SET_NAME, title[:MAX_NAME_BYTES])
