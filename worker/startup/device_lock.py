"""The device is taken before anything is loaded onto it: who comes second is told at once by whom.

The CPU is nobody's alone.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from protocol import devices
from protocol.config.worker import WorkerConfig
from worker.startup import device as machine


def claim(config: WorkerConfig) -> AbstractContextManager[object]:
    """Ours while it is open. Raises DeviceTaken, UnusableModel."""
    name = machine.identity_of(machine.choose_device(config.device))
    if name is None:
        return nullcontext()
    return devices.take(devices.directory(), name, _ourselves(config))


def _ourselves(config: WorkerConfig) -> devices.DeviceHolder:
    """As those are told who come later. Our address lies in the run directory of our server."""
    return devices.DeviceHolder(
        pid=os.getpid(),
        place=Path(config.address.removeprefix("ipc://")).parent.name,
        model=Path(config.model).name,
        since=time.time(),
        shares=config.share_device,
    )
