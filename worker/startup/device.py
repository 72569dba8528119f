"""Device, precision and number of threads of torch, chosen once before the first tensor. Facts
about the machine are in machine.py."""

from __future__ import annotations

import torch

from protocol.config.worker import Dtype
from worker.loading.errors import UnusableModel
from worker.startup.machine import dtype_name


def choose_device(wanted: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:N". Raises UnusableModel if it does not
    exist."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnusableModel(f"device {wanted} was requested, but torch finds no CUDA device")
    device = torch.device("cuda" if wanted == "auto" else wanted)
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= (count := torch.cuda.device_count()):
        raise UnusableModel(f"device {wanted} was requested, but torch finds {count} CUDA devices")
    return device


def identity_of(device: torch.device) -> str | None:
    """Return a name for the device that all processes of this machine agree on, or None for the
    CPU, which is not exclusive. The index does not do: it depends on CUDA_VISIBLE_DEVICES."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if (uuid := getattr(properties, "uuid", None)) is not None:
        return f"gpu-{uuid}"
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in place:
        return "gpu-" + ":".join(f"{number:02x}" for number in place)
    return f"gpu-{device.index}"


def choose_dtype(wanted: Dtype, device: torch.device, *, cpu_flags: frozenset[str]) -> torch.dtype:
    """Return the dtype of weights and K/V. `cpu_flags` is the result of `machine.cpu_flags()`."""
    name = dtype_name(wanted, is_gpu=device.type == "cuda", cpu_flags=cpu_flags)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def set_threads(threads: int) -> None:
    """Set torch's threads. Call once per process, before the first tensor operation, because torch
    creates its thread pools then."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
