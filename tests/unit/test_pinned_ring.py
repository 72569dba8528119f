"""Copies through pinned buffers: every number arrives, and no buffer is overwritten too early.

The device's queue is a list: a copy out of a buffer takes place when the test, or the ring, waits
for an event after it. So a buffer that is overwritten too early gives wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.checkpoints import random_llama
from tests.support.gguf_files import write_gguf
from tests.support.tiny_checkpoint import write_tiny_llama
from worker.checkpoint.pinned_ring import PinnedRing, copying_to
from worker.loading.decoder import open_weights
from worker.loading.header import ModelHeader, read_header

CPU = torch.device("cpu")


class Queue(TorchFunctionMode):
    """Delays each `copy_` with non_blocking until a later event of the queue is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], object]] = []
        self.num_done = 0
        self.num_waits = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.copy_ and kwargs.get("non_blocking"):
            self.work.append(lambda: Tensor.copy_(*args))
            return args[0]
        return function(*args, **kwargs)

    def mark(self, device: torch.device) -> QueueEvent:
        return QueueEvent(self, len(self.work))


class QueueEvent:
    def __init__(self, queue: Queue, num_before: int) -> None:
        self._queue = queue
        self._num_before = num_before

    def query(self) -> bool:
        return self._queue.num_done >= self._num_before

    def synchronize(self) -> None:
        queue = self._queue
        queue.num_waits += 1
        for copy in queue.work[queue.num_done : self._num_before]:
            copy()
        queue.num_done = max(queue.num_done, self._num_before)


@pytest.fixture
def queue() -> Iterator[Queue]:
    with Queue() as queue:
        yield queue


def a_ring(queue: Queue, *, num_buffers: int = 2, buffer_bytes: int = 256) -> PinnedRing:
    def allocate(num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    return PinnedRing(
        CPU,
        num_buffers=num_buffers,
        buffer_bytes=buffer_bytes,
        allocate=allocate,
        mark=queue.mark,
    )


def test_a_copy_is_only_queued(queue: Queue) -> None:
    ring, target = a_ring(queue), torch.zeros(4)
    ring.copy(target, torch.arange(4.0))
    assert not target.any()
    ring.wait()
    assert target.tolist() == [0, 1, 2, 3]


def test_small_tensors_share_a_buffer(queue: Queue) -> None:
    ring, targets = a_ring(queue), [torch.zeros(8) for _ in range(4)]
    for number, target in enumerate(targets):
        ring.copy(target, torch.full((8,), float(number)))
    assert (len(queue.work), queue.num_waits) == (4, 0)  # four times 64 bytes fill one buffer
    ring.wait()
    assert [target.unique().tolist() for target in targets] == [[0], [1], [2], [3]]


def test_a_tensor_larger_than_a_buffer_is_cut(queue: Queue) -> None:
    ring, target = a_ring(queue), torch.zeros(10, 20)
    source = torch.arange(200.0).view(10, 20)
    ring.copy(target, source)
    assert len(queue.work) == 4  # 800 bytes in buffers of 256
    ring.wait()
    assert torch.equal(target, source)


def test_a_buffer_is_used_again_only_after_its_event(queue: Queue) -> None:
    ring, targets = a_ring(queue), [torch.zeros(64) for _ in range(3)]
    for number, target in enumerate(targets[:2]):
        ring.copy(target, torch.full((64,), number + 1.0))
    assert queue.num_done == 0  # both buffers are full, and nothing waited
    ring.copy(targets[2], torch.full((64,), 3.0))
    assert queue.num_done == 1  # the second buffer may still be in use
    assert targets[0].unique().tolist() == [1]
    ring.wait()
    assert [target.unique().tolist() for target in targets] == [[1], [2], [3]]


def test_numbers_are_converted_on_the_way(queue: Queue) -> None:
    ring, target = a_ring(queue), torch.zeros(300, dtype=torch.bfloat16)
    source = torch.randn(300)
    ring.copy(target, source)
    ring.wait()
    assert torch.equal(target, source.bfloat16())


def test_targets_elsewhere_or_with_gaps_are_copied_at_once(queue: Queue) -> None:
    ring = PinnedRing(
        torch.device("cuda"), allocate=lambda num_bytes: torch.empty(0), mark=queue.mark
    )
    target = torch.zeros(3)
    ring.copy(target, torch.ones(3))
    assert target.all()
    target = torch.zeros(4, 2)[:, 0]
    a_ring(queue).copy(target, torch.ones(4))
    assert target.all()
    assert not queue.work


DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.int32, torch.uint8])


@given(
    st.lists(st.tuples(st.integers(0, 700), DTYPES, DTYPES), max_size=12),
    st.integers(1, 4),
    st.sampled_from([8, 64, 100, 256, 1000]),
)
def test_all_numbers_of_any_tensors_arrive(
    tensors: list[tuple[int, torch.dtype, torch.dtype]], num_buffers: int, buffer_bytes: int
) -> None:
    with Queue() as queue:
        ring = a_ring(queue, num_buffers=num_buffers, buffer_bytes=buffer_bytes)
        pairs = []
        for number, (size, kind, stored) in enumerate(tensors):
            source = (torch.arange(size) * 7 + number).remainder(120).to(stored)
            target = torch.zeros(size, dtype=kind)
            ring.copy(target, source.clone())
            pairs.append((target, source))
        ring.wait()
    for target, source in pairs:
        assert torch.equal(target, source.to(target.dtype))


@pytest.mark.parametrize("is_gguf", [False, True])
def test_weights_that_go_through_a_ring_are_those_of_the_file(
    tmp_path: Path, queue: Queue, is_gguf: bool
) -> None:
    path = tmp_path / "tiny.gguf"
    path = write_gguf(path, random_llama()) if is_gguf else write_tiny_llama(tmp_path)
    header = read_header(path)
    assert isinstance(header, ModelHeader)
    ring = a_ring(queue, buffer_bytes=4096)
    name, spec = header.tensors.embedding_matrix.names[0], header.spec
    whole, piecewise = (
        torch.zeros(spec.vocab_size, spec.hidden, dtype=torch.bfloat16) for _ in range(2)
    )
    open_weights(header).read_into(name, whole)
    open_weights(header, ring.copy).read_into(name, piecewise)
    ring.wait()
    assert whole.any()
    assert torch.equal(piecewise, whole)
    assert len(queue.work) > 1


def test_weights_for_a_cpu_need_no_ring() -> None:
    target = torch.zeros(3)
    with copying_to(CPU) as copy:
        copy(target, torch.ones(3))
        assert target.all()
