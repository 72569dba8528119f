"""The layers of a rank that need the other ranks of its group.

Each wraps a layer with the rank's part of the weights. All ranks call them in the same order, and
get the same bits from them.

Legend: N rows, V vocabulary, W tokens of a rank (`Share.vocabulary_width`), H query heads and H_kv
key/value heads of a rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.layers.embedding import Embedding
from worker.layers.group import Group
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.spec.share import Share


@dataclass(slots=True)
class SummedLinear:
    """A linear layer of which each rank has some columns. Its result is the sum over all ranks, of
    which only one has the bias."""

    own: Linear
    group: Group

    @property
    def num_weights(self) -> int:
        return self.own.num_weights

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.sum(self.own(x))

    def to_float(self, x: Tensor) -> Tensor:
        return self.group.sum(self.own.to_float(x))

    def tensors(self) -> Iterator[Tensor]:
        yield from self.own.tensors()


@dataclass(slots=True)
class GatheredHead:
    """An output head of which each rank has the rows of its tokens. Every rank gets all logits."""

    own: Linear
    share: Share
    group: Group

    @property
    def num_weights(self) -> int:
        return self.own.num_weights

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.own(x)
        logits = pad(logits, (0, self.share.vocabulary_width - logits.shape[1]))
        whole = self.group.gather(logits)  # [ranks, N, W]
        return whole.transpose(0, 1).flatten(1)[:, : self.share.vocab_size].contiguous()

    def to_float(self, x: Tensor) -> Tensor:
        return self(x).float()

    def tensors(self) -> Iterator[Tensor]:
        yield from self.own.tensors()


@dataclass(slots=True)
class SharedEmbedding:
    """An embedding of which each rank has the rows of its tokens."""

    own: Embedding
    share: Share
    group: Group

    @property
    def size(self) -> int:
        return self.share.vocab_size

    @property
    def num_weights(self) -> int:
        return self.own.num_weights

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def dtype(self) -> torch.dtype:
        return self.own.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        if token_ids.device.type == "cpu" and _are_outside(token_ids, self.size):
            raise IndexError(f"a token is outside the vocabulary of {self.size}")
        tokens = self.share.vocabulary
        is_own = (token_ids >= tokens.start) & (token_ids < tokens.stop)
        rows = self.own(torch.where(is_own, token_ids - tokens.start, 0))
        return self.group.sum(rows.masked_fill_(~is_own[:, None], 0))

    def tensors(self) -> Iterator[Tensor]:
        yield from self.own.tensors()


@dataclass(slots=True)
class JointlyNormed:
    """The projection to queries, keys and values, with RMS norms over all heads of all ranks. Each
    rank has the weights of its heads.

    q_norm   norm of the queries, weight [H * D]; k_norm likewise, [H_kv * D]
    """

    own: Linear
    q_norm: Norm
    k_norm: Norm
    group: Group

    @property
    def num_weights(self) -> int:
        return self.own.num_weights

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, (H + 2 H_kv) * D] for x [N, hidden], with normalised queries and keys."""
        qkv = self.own(x)
        norms = (self.q_norm, self.k_norm)
        widths = [norm.weight.numel() for norm in norms]
        parts = torch.split(qkv[:, : sum(widths)], widths, dim=1)
        squares = torch.stack([part.float().square().sum(-1) for part in parts], dim=1)
        totals = self.group.sum(squares)  # [N, 2]
        for part, norm, total in zip(parts, norms, totals.unbind(1), strict=True):
            mean = total / (norm.weight.numel() * self.group.size)
            scale = torch.rsqrt(mean + norm.spec.eps)
            part.copy_(part.float() * scale[:, None] * norm.weight.float())
        return qkv

    def to_float(self, x: Tensor) -> Tensor:
        return self(x).float()

    def tensors(self) -> Iterator[Tensor]:
        yield from self.own.tensors()
        for norm in (self.q_norm, self.k_norm):
            yield from norm.tensors()


def _are_outside(token_ids: Tensor, vocab_size: int) -> bool:
    return bool(((token_ids < 0) | (token_ids >= vocab_size)).any())
