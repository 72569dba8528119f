"""From device tensors to host memory, without waiting until somebody wants to read them.

Whoever computes says `copy`, which queues; when all is queued, `seal` marks the place; whoever
reads says `wait`, which waits for that place and for nothing that was queued behind it. On the CPU
nothing is queued: a copy is the tensor itself, there to be read at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A place in a device's queue of work, as torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether all work before it is done. Never waits."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class HostDone:
    """The place in the queue of a device that has none."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


Mark = Callable[[torch.device], DeviceEvent]


def mark(device: torch.device) -> DeviceEvent:
    """The device's queue as it is now. Who waits for the event sleeps and does not spin."""
    if device.type == "cpu":
        return HostDone()
    event: DeviceEvent = torch.cuda.current_stream(device).record_event(
        torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    )
    return event


class Readback:
    """What one step reads back."""

    def __init__(self, device: torch.device, mark: Mark = mark) -> None:
        self._device = device
        self._mark = mark
        self._event: DeviceEvent | None = None

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor in host memory: to be read when `wait` has returned, not earlier."""
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def seal(self) -> None:
        """All that the step computes and copies is queued."""
        assert self._event is None, "a step is sealed once"
        self._event = self._mark(self._device)

    @property
    def is_done(self) -> bool:
        return self._sealed().query()

    def wait(self) -> None:
        self._sealed().synchronize()

    def _sealed(self) -> DeviceEvent:
        assert self._event is not None, "a step is sealed before it is read"
        return self._event
