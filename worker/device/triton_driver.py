"""Checks whether Triton can launch kernels on this machine."""

from __future__ import annotations

import subprocess
from functools import cache


@cache
def reason_against_launches() -> str:
    """Return why Triton cannot launch kernels here; "" if it can.

    The first call imports Triton, which takes a second. Triton then loads a module for the driver,
    which it compiles with the machine's C compiler unless its cache (TRITON_CACHE_DIR, otherwise in
    the user's home) has it.
    """
    try:
        import triton

        triton.runtime.driver.active.get_current_device()
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"Triton cannot launch kernels: {str(error).partition(chr(10))[0]}"
    return ""
