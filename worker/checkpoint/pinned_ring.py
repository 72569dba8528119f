"""Copies weights to a GPU through a ring of pinned buffers.

A copy from memory that is not pinned blocks: the driver copies it in pieces through a buffer of its
own, and meanwhile nothing is read from the file. Here a piece is copied from the file into a pinned
buffer, and the GPU copies it from there while the next piece is read into another buffer.

Legend: N items of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from worker.device.readback import DeviceEvent, Mark, mark

NUM_BUFFERS = 2
"""Two suffice, because the GPU empties a buffer faster than the file fills the other one."""
BUFFER_BYTES = 64 << 20
ALIGNMENT = 64
"""Offsets of tensors in a buffer are multiples of this number, so that each can be viewed as
numbers of its dtype."""

Copy = Callable[[Tensor, Tensor], object]
"""Copies a tensor of the files to another one with the same number of items: `copy(target,
source)`. Converts dtype and device. The source can be dropped once this returns."""


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """Copy at once."""
    target.copy_(source)


def pinned(num_bytes: int) -> Tensor:
    """Return pinned memory, uint8 [num_bytes]."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class PinnedRing:
    """Copies tensors to `device`. Call `wait` before the ring is dropped.

    A buffer is filled from front to back. Tensors that fit share it, and larger ones are cut. The
    next buffer is then used once the copies out of it are done. The numbers are converted to the
    target's dtype while they are copied into the buffer.

    allocate   returns pinned memory
    mark       records an event after all copies that were queued so far
    """

    def __init__(
        self,
        device: torch.device,
        *,
        num_buffers: int = NUM_BUFFERS,
        buffer_bytes: int = BUFFER_BYTES,
        allocate: Callable[[int], Tensor] = pinned,
        mark: Mark = mark,
    ) -> None:
        self._device = device
        self._size = buffer_bytes
        self._mark = mark
        self._buffers = [allocate(buffer_bytes) for _ in range(num_buffers)]
        #: The event after the copies out of each buffer; None if none was recorded.
        self._events: list[DeviceEvent | None] = [None] * num_buffers
        self._current = 0
        #: Bytes of the current buffer that are in use.
        self._used = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` [N] on the CPU to `target` [N], which may have another dtype; see `Copy`.
        A target that is not on the device is copied at once, as is one that is not contiguous."""
        if target.device != self._device or not target.is_contiguous():
            target.copy_(source)
            return
        targets, sources = target.view(-1), source.reshape(-1)
        done = 0
        while done < len(targets):
            buffer = self._free_part(targets.dtype)
            part = slice(done, min(done + len(buffer), len(targets)))
            staged = buffer[: part.stop - part.start].copy_(sources[part])
            targets[part].copy_(staged, non_blocking=True)
            self._used += staged.nbytes
            done = part.stop

    def wait(self) -> None:
        """Wait until all copies are done."""
        self._mark(self._device).synchronize()

    def _free_part(self, dtype: torch.dtype) -> Tensor:
        """Return the free part of the current buffer as numbers of `dtype`; if it is full, all of
        the next one."""
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + dtype.itemsize > self._size:
            self._advance()
            start = 0
        self._used = start
        end = start + (self._size - start) // dtype.itemsize * dtype.itemsize
        return self._buffers[self._current][start:end].view(dtype)

    def _advance(self) -> None:
        """Make the next buffer the current one, once the copies out of it are done."""
        self._events[self._current] = self._mark(self._device)
        self._current = (self._current + 1) % len(self._buffers)
        event = self._events[self._current]
        if event is not None:
            event.synchronize()
        self._used = 0


@contextmanager
def copying_to(device: torch.device) -> Iterator[Copy]:
    """Yield the function that copies the weights of a model to a device. All copies are done when
    the block ends."""
    if device.type == "cpu":
        yield copy_tensor
        return
    ring = PinnedRing(device)
    yield ring.copy
    ring.wait()
