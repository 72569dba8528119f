"""Tensors that are moved to a device share memory there as on the CPU, and come back."""

from __future__ import annotations

import torch

from tests.support.triton_device import MovedMemory, moving

CPU = torch.device("cpu")


def test_what_a_launch_writes_comes_back() -> None:
    x, y = torch.zeros(3), torch.ones(3)

    def add(source: torch.Tensor, *, target: torch.Tensor, factor: int) -> None:
        assert source.data_ptr() != y.data_ptr()
        target.add_(source, alpha=factor)

    moving(add, CPU)(y[1:], target=x[1:], factor=2)
    assert x.tolist() == [0, 2, 2]


def test_views_of_one_tensor_share_memory_and_keep_their_layout() -> None:
    whole = torch.arange(12.0).view(3, 4)
    memory = MovedMemory(CPU)
    one, other = memory.move(whole[1:, ::2]), memory.move(whole.T)
    assert (one.stride(), one.storage_offset()) == ((4, 2), 4)
    one.fill_(-1)
    assert other.T.tolist() == [[0, 1, 2, 3], [-1, 5, -1, 7], [-1, 9, -1, 11]]
    memory.copy_back()
    assert whole[2].tolist() == [-1, 9, -1, 11]


def test_what_is_no_tensor_is_not_moved() -> None:
    grid = (3, 1)
    assert MovedMemory(CPU).move(grid) is grid
