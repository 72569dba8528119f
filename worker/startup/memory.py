"""Free memory of a device. memory_plan.py decides what to do with it."""

from __future__ import annotations

import torch

from worker.startup.machine import free_host_bytes


def free_bytes(device: torch.device) -> int:
    """Return the memory that can still be allocated, on the device or in this container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()
