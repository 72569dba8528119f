"""Checks a model like Qwen3 in bfloat16 on the device against the same weights in float32 on the
CPU, at positions whose tokens are given.

Random weights make many tokens nearly equally likely, so roundings alone change some greedy tokens.
The yardstick is torch's kernels in bfloat16 on the same device: ours must be as exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.gpu.attention import our_attention
from tests.gpu.checkpoints import write_checkpoint
from tests.gpu.session import GpuSession
from tests.gpu.table import GpuRow, checked, figure
from tests.support.flash_contract import on_device
from tests.support.paged import PagedRow, attention_batch
from worker.attention.base import Attention, AttentionBatch
from worker.attention.torch_paged import TorchPagedAttention
from worker.kernels.reference import TorchKernels
from worker.kv.cache import KVCache
from worker.loading.decoder import LoadedModel, load_model
from worker.models.base import RowModel

BLOCK_TOKENS = 16
MAX_ERROR, MIN_EQUAL = 2e-2, 0.99
"""Goals: the mean error of logprobs, and the share of greedy tokens that are equal."""
MORE_ERROR, FEWER_EQUAL = 1.25, 0.01
"""Our kernels may have this many times the error of torch's, and this share of the tokens less."""
CPU = torch.device("cpu")


def check_accuracy(session: GpuSession) -> Iterator[GpuRow]:
    num_rows, num_tokens = session.choose((64, 128), (3, 32))
    folder = write_checkpoint(session.config("qwen3-small"), session.models / "accuracy", CPU)
    exact = load_model(folder, dtype=torch.float32, device=CPU)
    vocab = exact.card.vocab_size
    tokens = torch.randint(
        vocab, (num_rows, num_tokens), generator=torch.Generator().manual_seed(1)
    )
    attention = TorchPagedAttention(BLOCK_TOKENS, torch.float32)
    expected = _logprobs(exact, attention, tokens, CPU, num_decodes=0)
    half = num_tokens // 2
    ours = Agreement.of(_logprobs(*_ours(session, folder), tokens, session.device, half), expected)
    yardstick = _logprobs(*_torchs(session, folder), tokens, session.device, half)
    theirs = Agreement.of(yardstick, expected)
    worst = f"largest {ours.max_error:.1e}"
    yield figure("mean error of logprobs", ours.error, "", at_most=MAX_ERROR, text=worst)
    yield figure("greedy tokens that are equal", 100 * ours.equal, "%", at_least=100 * MIN_EQUAL)
    yield checked(
        "as exact as torch's kernels in bfloat16",
        f"theirs: mean error {theirs.error:.1e}, {theirs.equal:.1%} equal",
        is_right=ours.error <= MORE_ERROR * theirs.error
        and ours.equal >= theirs.equal - FEWER_EQUAL,
    )


@dataclass(frozen=True)
class Agreement:
    """How well logprobs agree with exact ones: the mean and the largest error of the most likely
    tokens, and the share of positions at which these tokens are equal."""

    error: float
    max_error: float
    equal: float

    @classmethod
    def of(cls, found: Tensor, exact: Tensor) -> Agreement:
        best = exact.argmax(-1, keepdim=True)
        errors = (found - exact).gather(-1, best).abs()
        is_equal = found.argmax(-1, keepdim=True) == best
        return cls(float(errors.mean()), float(errors.max()), float(is_equal.float().mean()))


def _torchs(session: GpuSession, folder: Path) -> tuple[LoadedModel, Attention]:
    """Return the model on the device with torch's kernels."""
    dtype, device = torch.bfloat16, session.device
    loaded = load_model(folder, dtype=dtype, device=device, kernels=TorchKernels())
    return loaded, TorchPagedAttention(BLOCK_TOKENS, dtype)


def _ours(session: GpuSession, folder: Path) -> tuple[LoadedModel, Attention]:
    """Return the model on the device with our kernels. In a rehearsal they are torch's, because
    Triton's interpreter cannot multiply bfloat16."""
    if session.is_rehearsal:
        return _torchs(session, folder)
    kernels = session.triton("worker.kernels.gpu").TritonKernels()
    loaded = load_model(folder, dtype=torch.bfloat16, device=session.device, kernels=kernels)
    return loaded, our_attention(session, BLOCK_TOKENS)


@torch.inference_mode()
def _logprobs(
    loaded: LoadedModel,
    attention: Attention,
    tokens: Tensor,
    device: torch.device,
    num_decodes: int,
) -> Tensor:
    """Return the logprobs [R, N, V] float32, on the CPU, after each of tokens [R, N]. The last
    `num_decodes` tokens of each row are computed one at a time, and those before them together."""
    spec, (num_rows, num_tokens) = loaded.spec, tokens.shape
    width = -(-num_tokens // BLOCK_TOKENS)
    heads = (spec.layer_heads[0].count, spec.layer_heads[0].dim)
    dtype = getattr(torch, loaded.card.dtype)
    cache = KVCache(spec.num_layers, 1 + num_rows * width, BLOCK_TOKENS, *heads, dtype, device)
    ends = [*range(num_tokens - num_decodes, num_tokens + 1)]
    parts = []
    for start, end in zip([0, *ends], ends, strict=False):
        rows = [
            PagedRow(start, end - start, range(1 + row * width, 1 + (row + 1) * width))
            for row in range(num_rows)
        ]
        batch = _batch(attention_batch(rows, BLOCK_TOKENS), device)
        ids = tokens[:, start:end].reshape(-1).to(device)
        assert not isinstance(loaded.model, RowModel)
        hidden = loaded.model(ids, batch, cache, attention)
        logprobs = loaded.model.logits(hidden).log_softmax(-1).cpu()
        parts.append(logprobs.view(num_rows, end - start, -1))
    return torch.cat(parts, 1)


def _batch(batch: AttentionBatch, device: torch.device) -> AttentionBatch:
    return batch if device.type == "cpu" else on_device(batch, device)
