"""Stand-ins for the fused kernels of a GPU, for the pretended device.

Each call counts as the launches of the fused kernel, and its slow twin computes the result. That
the twins and the kernels agree is tested elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.pretended_device import PretendedDevice
from worker.attention.base import AttentionBatch
from worker.kernels.reference import TorchKernels
from worker.layers.rope import CosSin


class FusedTwins(TorchKernels):
    """Torch's kernels. Each of them is one launch."""

    def __init__(self, device: PretendedDevice) -> None:
        self._device = device

    def cos_sin(self, *arguments: Any, **options: Any) -> CosSin:
        with self._device.fused("cos_sin"):
            return super().cos_sin(*arguments, **options)

    def add_norm(self, *arguments: Any, **options: Any) -> Tensor:
        with self._device.fused("add_norm"):
            return super().add_norm(*arguments, **options)

    def place(self, *arguments: Any, **options: Any) -> Tensor:
        with self._device.fused("place"):
            return super().place(*arguments, **options)

    def activate(self, *arguments: Any, **options: Any) -> Tensor:
        with self._device.fused("activate"):
            return super().activate(*arguments, **options)


class FusedAttention:
    """Attention from what the kernels of a GPU read, and nothing else: tensors of the device. In
    each layer it is two launches for each kind of row: a kernel, and the merge of its parts."""

    is_capturable = True

    def __init__(self, device: PretendedDevice) -> None:
        self._device = device

    def plan(self, batch: AttentionBatch, window: int | None = None, like: Any = None) -> FusedPlan:
        assert batch.device_row_starts is not None
        assert batch.device_context_lens is not None
        for tensor in (batch.device_row_starts, batch.device_context_lens, batch.block_table):
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
        num_rows = len(batch.context_lens)
        return FusedPlan(
            batch.device_row_starts,
            batch.device_context_lens,
            batch.block_table,
            window,
            launches=2 * ((batch.num_decodes > 0) + (batch.num_decodes < num_rows)),
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: FusedPlan,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert sinks is None
        with self._device.fused("attention", plan.launches):
            return _attend(q, k_cache, v_cache, plan, scale or q.shape[-1] ** -0.5, soft_cap)


@dataclass(frozen=True)
class FusedPlan:
    """The tensors that the kernels read (see AttentionBatch), and the number of their launches in a
    layer."""

    row_starts: Tensor
    context_lens: Tensor
    block_table: Tensor
    window: int | None
    launches: int


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: FusedPlan,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """Return the attention of each token, [T, H, D], which gathers all blocks of its row's table. A
    token that sees no keys, as in a row of padding, gets 0."""
    tokens = torch.arange(len(q), device=q.device)
    rows = torch.searchsorted(plan.row_starts[1:].contiguous(), tokens, right=True)
    ends = plan.row_starts.index_select(0, rows + 1)
    last = plan.context_lens.index_select(0, rows) - ends + tokens
    starts = torch.arange(plan.block_table.shape[1], device=q.device) * k_cache.shape[1]
    tables = plan.block_table.index_select(0, rows).masked_fill(starts > last[:, None], 0)
    k, v = (cache[tables].flatten(1, 2) for cache in (k_cache, v_cache))  # [T, N, H_kv, D]
    keys = torch.arange(k.shape[1], device=q.device)
    is_seen = keys <= last[:, None]
    if plan.window is not None:
        is_seen &= keys > last[:, None] - plan.window
    k, v = (torch.where(is_seen[:, :, None, None], each, 0.0) for each in (k, v))
    grouped = q.view(len(q), k.shape[2], -1, q.shape[2])
    scores = torch.einsum("thgd,tnhd->thgn", grouped, k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~is_seen[:, None, None], float("-inf"))
    weights = torch.nan_to_num(torch.softmax(scores, -1))
    return torch.einsum("thgn,tnhd->thgd", weights, v).reshape(q.shape)
