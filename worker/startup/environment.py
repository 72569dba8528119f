"""What must be in the environment before torch is loaded, by whichever way the room is entered."""

from __future__ import annotations

import os

PRODUCTS_KEPT = 128
"""oneDNN makes code for each shape that it multiplies, and a step's number of rows is part of the
shape: 256 of them times a layer's four matrices came to 600 MB, kept twice, by oneDNN and by what
torch calls it with. So many suffice for decode steps of 32 rows; what is made anew for a
prompt of rare length takes a millisecond, once in a step, whatever the number of layers."""


def prepare() -> None:
    """What the user has set stays.

    OMP_WAIT_POLICY is read by the OpenMP runtime: threads that wait sleep instead of spinning. Two
    that spin on cores which other processes need made a step ten times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(PRODUCTS_KEPT))
