"""Copies device tensors to host memory, without waiting until the result is needed.

`copy` queues a copy, `seal` records an event after all copies, and `wait` waits for that event but
not for later work. On the CPU nothing is queued: a copy is the tensor itself, readable at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """An event in a device's work queue, such as torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether all work before the event is done. Never waits."""
        ...

    def synchronize(self) -> None:
        """Wait until all work before the event is done."""
        ...


class HostDone:
    """The event of a device without a work queue. It is always done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


Mark = Callable[[torch.device], DeviceEvent]


def mark(device: torch.device) -> DeviceEvent:
    """Record an event in the device's queue, and return it. A thread that waits for it sleeps
    instead of spinning. On the CPU, return an event that is done."""
    if device.type == "cpu":
        return HostDone()
    event: DeviceEvent = torch.cuda.current_stream(device).record_event(
        torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    )
    return event


class Readback:
    """Copies the results of one step to host memory."""

    def __init__(self, device: torch.device, mark: Mark = mark) -> None:
        self._device = device
        self._mark = mark
        self._event: DeviceEvent | None = None

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the tensor in host memory. Do not read it before `wait` has returned."""
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def seal(self) -> None:
        """Record the event. Call it after all computation and copies of the step are queued."""
        assert self._event is None, "a step must be sealed only once"
        self._event = self._mark(self._device)

    @property
    def is_done(self) -> bool:
        return self._sealed().query()

    def wait(self) -> None:
        self._sealed().synchronize()

    def _sealed(self) -> DeviceEvent:
        assert self._event is not None, "a step must be sealed before it is read"
        return self._event
