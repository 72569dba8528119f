"""Imports modules without pauses for the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Import large modules in this block. The garbage collector is off in it, and later collections
    skip the objects that exist at its end.

    Imports create objects that live as long as the process, and hardly any garbage. Collections
    took a tenth of their CPU time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
