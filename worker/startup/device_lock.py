"""Exclusive lock on the GPU, taken before anything is loaded onto it.

A second worker fails at once, with the name of the holder. The CPU is not locked.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from protocol import devices
from protocol.config.worker import WorkerConfig
from worker.startup import device as machine


def lock_device(config: WorkerConfig) -> AbstractContextManager[object]:
    """Lock the configured device until the context exits. Raises DeviceInUse, UnusableModel."""
    name = machine.identity_of(machine.choose_device(config.device))
    if name is None:
        return nullcontext()
    return devices.claim_device(devices.directory(), name, _holder(config))


def _holder(config: WorkerConfig) -> devices.DeviceHolder:
    """Return the description of this worker that a later one shows in its error. The socket's
    address lies in the run directory of this worker's server."""
    return devices.DeviceHolder(
        pid=os.getpid(),
        place=Path(config.address.removeprefix("ipc://")).parent.name,
        model=Path(config.model).name,
        since=time.time(),
        shares=config.share_device,
    )
