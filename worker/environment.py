"""What must be in the environment before torch is loaded, by whichever way the room is entered."""

from __future__ import annotations

import os


def prepare() -> None:
    """What the user has set stays.

    OMP_WAIT_POLICY is read by the OpenMP runtime: threads that wait sleep instead of spinning. Two
    that spin on cores which other processes need made a step ten times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
