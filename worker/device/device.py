"""Chooses the device and its threads, reads its free memory, and locks a GPU.

All choices are made once, before the first tensor. Facts about the machine are in machine.py.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from protocol.config.worker import WorkerConfig
from protocol.process import devices
from worker.device.machine import free_host_bytes
from worker.errors import UnusableModel


def choose_device(wanted: str, local_rank: int | None = None) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:N". Raises UnusableModel if it does not
    exist.

    local_rank   number of the GPU of this rank of a group, unless one is named; None: no group
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnusableModel(f"device {wanted} was requested, but torch finds no CUDA device")
    device = torch.device("cuda" if wanted == "auto" else wanted)
    if device.index is None and local_rank is not None:
        device = torch.device("cuda", local_rank)
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= (count := torch.cuda.device_count()):
        raise UnusableModel(f"device {device} is needed, but torch finds {count} CUDA devices")
    return device


def make_current(device: torch.device) -> None:
    """Make a GPU the one that this thread uses wherever no device is named: for pinned memory, and
    for kernels that are launched outside torch. Call this before the first allocation, because
    otherwise memory of the first GPU is taken, too."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def identity_of(device: torch.device) -> str | None:
    """Return a name for the device on which all processes of this machine agree. Return None for
    the CPU, which is not exclusive.

    The name contains the GPU's UUID or its PCI address. If torch reports neither, the name
    contains the device's index, which depends on CUDA_VISIBLE_DEVICES.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if (uuid := getattr(properties, "uuid", None)) is not None:
        return f"gpu-{uuid}"
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in place:
        return "gpu-" + ":".join(f"{number:02x}" for number in place)
    return f"gpu-{device.index}"


def set_threads(threads: int) -> None:
    """Set the number of torch's threads. Call this once per process, before the first tensor
    operation, because torch creates its thread pools then."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def free_bytes(device: torch.device) -> int:
    """Return the memory that can still be allocated, in bytes, on the GPU or in this container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()


def gpu_of_rank(config: WorkerConfig) -> int | None:
    """Return the number of the GPU for this rank of a group; None if there is no group."""
    return config.local_rank if config.world_size > 1 else None


def lock_device(config: WorkerConfig) -> AbstractContextManager[object]:
    """Lock the configured device until the context exits. Call this before anything is loaded onto
    it.

    The CPU is not locked. Raises UnusableModel if the device does not exist, and DeviceInUse, with
    the name of the holder, if another worker uses it. Workers with `share_device` can share it.
    """
    name = identity_of(choose_device(config.device, gpu_of_rank(config)))
    if name is None:
        return nullcontext()
    return devices.claim_device(devices.directory(), name, _holder(config))


def _holder(config: WorkerConfig) -> devices.DeviceHolder:
    """Return the description of this worker that a later one shows in its error. The directory of
    the socket's address is the run directory of this worker's server."""
    return devices.DeviceHolder(
        pid=os.getpid(),
        place=Path(config.address.removeprefix("ipc://")).parent.name,
        model=Path(config.model).name,
        since=time.time(),
        shares=config.share_device,
    )
