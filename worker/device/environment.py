"""Prepares the process before torch is loaded, and reads variables for other modules. Every entry
point that computes steps calls `prepare`."""

from __future__ import annotations

import os

from worker.device import machine
from worker.device.postponed import postpone_torch_parts

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
MAX_CACHED_KERNELS = 128
"""Maximum number of compiled kernels in oneDNN's cache, and in torch's own cache in front of it.

oneDNN compiles a kernel for each shape that it multiplies, and the number of rows of a step is part
of the shape. With 256 row counts and a layer's four matrices the two caches grew to 600 MB. 128
entries suffice for decode steps of 32 rows. A kernel for a prompt of rare length is compiled again
in about a millisecond, once per step, whatever the number of layers.
"""


def prepare() -> None:
    """Set environment variables, and postpone parts of torch's import that no step uses. A value
    that the user has set is kept.

    OMP_WAIT_POLICY makes idle OpenMP threads sleep instead of spin. Two threads that spun on cores
    needed by other processes made a step ten times as long. TRITON_CACHE_DIR keeps compiled kernels
    of a GPU in $TIDEGATE_HOME, if that is set: a service has no home of its own.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(MAX_CACHED_KERNELS))
    if home := os.environ.get("TIDEGATE_HOME"):
        os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(home, "triton"))
    build = machine.torch_build()
    postpone_torch_parts(build.version, is_gpu=bool(build.gpu))


def visible_devices() -> str | None:
    """Return the variable by which the user hides GPUs from this process; None if it is not set."""
    return os.environ.get(VISIBLE_DEVICES)


def gloo_interface() -> str | None:
    """Return the variable by which the user chooses the network interface that connects the ranks
    of a group on CPUs; None if it is not set."""
    return os.environ.get(GLOO_INTERFACE)
