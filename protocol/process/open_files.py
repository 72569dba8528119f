"""The limit of the operating system on the files and sockets that a process has open."""

from __future__ import annotations

import resource

MOST_FILES = 1 << 20
"""Some systems allow a thousand times as many, for which libraries then make tables."""


def raise_file_limit() -> int:
    """Raise the soft limit of this process, and of those that it starts, to the hard limit. Return
    the limit that applies now.

    The usual soft limit of 1,024 is that of programs that call `select`. Here nothing does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # some systems have a limit below the hard one
            return soft
        return wanted
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft
