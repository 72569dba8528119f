"""Runs the tests of Triton kernels, which interpret them with tensors on the CPU, on a GPU.

If the variable DEVICE names a device, the kernels of `interpreted` modules (triton_code.py) are not
interpreted: they are compiled, and each launch copies the tensors among its arguments to the
device, with everything else in their memory, and back. So the same tests check what a GPU computes.

Tests that change a constant of a kernel's module are marked `interpreted`, because a kernel that is
compiled has read it already.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DEVICE = "TIDEGATE_TEST_TRITON"

Launch = Callable[..., object]


def chosen_device() -> torch.device | None:
    """Return the device that the environment names, or None."""
    name = os.environ.get(DEVICE)
    return torch.device(name) if name else None


def moving(run: Launch, device: torch.device) -> Launch:
    """Return the launch `run` of a kernel for tensors on the CPU, which are copied to the device
    and back."""

    def launch(*args: Any, **kwargs: Any) -> None:
        memory = MovedMemory(device)
        moved = {name: memory.move(value) for name, value in kwargs.items()}
        run(*map(memory.move, args), **moved)
        memory.copy_back()

    return launch


class MovedMemory:
    """The memory of some tensors of the CPU, copied to a device. Tensors that share memory on the
    CPU share it there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def move(self, value: Any) -> Any:
        """Return a tensor of the device with the memory of `value`; what is no tensor is returned
        as it is."""
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._copies:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            self._copies[storage.data_ptr()] = (whole, whole.to(self._device, copy=True))
        there = self._copies[storage.data_ptr()][1].untyped_storage()
        moved = torch.empty(0, dtype=value.dtype, device=self._device)
        return moved.set_(there, value.storage_offset(), value.size(), value.stride())  # type: ignore[call-overload]

    def copy_back(self) -> None:
        """Copy what has changed to the CPU. Memory that has not changed may be read-only."""
        for here, there in self._copies.values():
            found = there.cpu()
            if not torch.equal(found, here):
                here.copy_(found)
