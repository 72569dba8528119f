"""The forward pass of a head with which a checkpoint proposes tokens (spec/draft_head.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.base import Attention, AttentionBatch
from worker.kernels.base import Kernels
from worker.kv.cache import PagedCache
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.models.decoder import DecoderModel, DecoderWeights
from worker.spec.model_spec import ModelSpec


@dataclass(slots=True)
class DraftHeadWeights:
    """The weights of a head.

    projection   weight [hidden, 2 * hidden]: columns of the embedding, then of the hidden states
    decoder      the head's layers and its norm; the embedding and the output head are the model's
    """

    embedding_norm: Norm
    hidden_norm: Norm
    projection: Linear
    decoder: DecoderWeights

    def tensors(self) -> Iterator[Tensor]:
        """Yield the head's own tensors."""
        for part in (self.embedding_norm, self.hidden_norm, self.projection, self.decoder.norm):
            yield from part.tensors()
        for layer in self.decoder.layers:
            yield from layer.tensors()


class DraftHead:
    """A head that proposes tokens. It has no state of any request.

    Legend: T entries, V vocabulary.
    """

    def __init__(
        self, spec: ModelSpec, weights: DraftHeadWeights, kernels: Kernels | None = None
    ) -> None:
        self.weights = weights
        self._decoder = DecoderModel(spec, weights.decoder, kernels)
        self.kernels = self._decoder.kernels

    @torch.inference_mode()
    def __call__(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        batch: AttentionBatch,
        cache: PagedCache,
        attention: Attention,
    ) -> Tensor:
        """Compute entries: write their keys and values to `cache`, and return their hidden states
        [T, hidden] before the final norm.

        token_ids   [T] int64, the tokens that follow the entries' positions
        hidden      [T, hidden] hidden states of the positions, after the final norm: the model's,
                    or the head's own of the entry before
        """
        weights = self.weights
        embedded = weights.decoder.embedding(token_ids)
        parts = weights.embedding_norm(embedded), weights.hidden_norm(hidden.to(embedded.dtype))
        x = weights.projection(torch.cat(parts, 1))
        if self._decoder.spec.float_residual:
            x = x.float()
        return self._decoder.compute(x, batch, cache, attention)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the final norm of hidden [T, hidden], in float32."""
        return self._decoder.normed(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [T, V] float32 of hidden [T, hidden]."""
        return self._decoder.logits(hidden)
