"""Where and in what precision torch computes, and with how many threads: read once, before any
tensor. Facts about the machine are in machine.py."""

from __future__ import annotations

import torch

from protocol.config.worker import Dtype
from worker.loading.errors import UnusableModel
from worker.startup.machine import dtype_name


def choose_device(wanted: str) -> torch.device:
    """wanted: "auto", "cpu", "cuda" or "cuda:N". Raises UnusableModel where that is absent."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnusableModel(f"device {wanted} was asked for, but torch sees no CUDA device")
    device = torch.device("cuda" if wanted == "auto" else wanted)
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= (count := torch.cuda.device_count()):
        raise UnusableModel(f"device {wanted} was asked for, but torch sees {count} CUDA devices")
    return device


def identity_of(device: torch.device) -> str | None:
    """By which all processes of this machine call a device that one of them has alone; None for the
    CPU, which is everybody's. A number would not do: it depends on what a process may see."""
    if device.type != "cuda":
        return None
    told = torch.cuda.get_device_properties(device)
    if (uuid := getattr(told, "uuid", None)) is not None:
        return f"gpu-{uuid}"
    place = [getattr(told, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in place:
        return "gpu-" + ":".join(f"{number:02x}" for number in place)
    return f"gpu-{device.index}"


def choose_dtype(wanted: Dtype, device: torch.device, *, cpu_flags: frozenset[str]) -> torch.dtype:
    """`cpu_flags`: what `machine.cpu_flags()` reads."""
    name = dtype_name(wanted, is_gpu=device.type == "cuda", cpu_flags=cpu_flags)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def set_threads(threads: int) -> None:
    """Once per process and before its first tensor operation: torch fixes its pools then."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
