"""Ends a process without the teardown of the Python interpreter."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

LOST_OUTPUT = 120
"""Exit code of a process that could not write out its output, as of Python itself."""


def quick_exit(code: int) -> NoReturn:
    """Run the exit functions, write out stdout and stderr, and end the process with `code`.

    The interpreter would free each object first, which takes a tenth of a second of CPU time in a
    process that has imported torch. If there are threads that it would wait for, the process ends
    as usual.
    """
    main = threading.main_thread()
    if any(not thread.daemon for thread in threading.enumerate() if thread is not main):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:  # None if the process was started without it
            continue
        try:
            stream.flush()
        except BrokenPipeError:
            pass  # nothing reads it any more
        except OSError:
            code = code or LOST_OUTPUT
    os._exit(code)
