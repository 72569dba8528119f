"""Computes vectors and scores of inputs with a decoder model, as for embeddings and reranking.

The vector or score of an input comes from the hidden state of its last token, or from the mean over
all its tokens. Each token attends only to itself and the tokens before it, as in generation.

The model's own forward pass computes the step, with a small K/V cache that only this step uses. All
layers share the memory of one layer in this cache, because a layer reads only what it has just
written.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from protocol.engine.encoding import MAX_STEP_INPUTS
from worker.attention.base import Attention, AttentionBatch
from worker.device.staging import upload
from worker.encoders.pooling import InputHead
from worker.encoders.ragged import RaggedBatch
from worker.kv.cache import KVCache
from worker.models.base import StepModel
from worker.spec.facts import KVHeads
from worker.spec.kv_blocks import LayerPlace


def scratch_blocks(max_tokens: int, block_tokens: int) -> int:
    """Return the number of blocks, with the null block, of the cache of a step of up to
    `max_tokens` tokens."""
    return -(-max_tokens // block_tokens) + MAX_STEP_INPUTS + 1


class DecoderVectors:
    """Makes vectors or scores from a decoder's hidden states. It implements EncodeModel.

    norm         the final norm, if `model` does not apply it itself; else None
    max_tokens   most tokens of a step
    """

    def __init__(
        self,
        model: StepModel,
        head: InputHead,
        attention: Attention,
        *,
        norm: Callable[[Tensor], Tensor] | None,
        num_layers: int,
        heads: KVHeads,
        block_tokens: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._head = head
        self._attention = attention
        self._norm = norm
        self._cache = KVCache(
            1,
            scratch_blocks(max_tokens, block_tokens),
            block_tokens,
            heads.count,
            heads.dim,
            dtype,
            device,
            places=[LayerPlace(0, 0)] * num_layers,
            is_latent=heads.is_latent,
        )
        self.device = device

    def __call__(self, batch: RaggedBatch) -> Tensor:
        hidden = self._model(batch.token_ids, self._placed(batch), self._cache, self._attention)
        return self._head(hidden, batch, self._norm)

    def _placed(self, batch: RaggedBatch) -> AttentionBatch:
        """Return the AttentionBatch of a step. Each input gets blocks of its own in the scratch
        cache, from block 1 on, because block 0 is the null block."""
        size = self._cache.block_tokens
        sizes = batch.sizes
        blocks = -(-sizes // size)
        first = 1 + blocks.cumsum() - blocks
        most = int(blocks.max())
        # The rest of an input's last block is masked, but what an earlier step has left there must
        # be finite all the same.
        self._cache.zero(upload([first + blocks - 1], self.device)[0])
        column = np.arange(most)
        table = np.where(column < blocks[:, None], first[:, None] + column, 0)
        starts = np.concatenate(([0], sizes.cumsum()))
        owner = np.repeat(np.arange(len(sizes)), sizes)
        mapping = first[owner] * size + np.arange(starts[-1]) - starts[owner]
        is_on_gpu = self.device.type != "cpu"
        moved = upload([mapping, table.reshape(-1), starts, sizes], self.device)
        tables = moved[1].view(len(sizes), most)
        return AttentionBatch(
            positions=batch.positions,
            slot_mapping=moved[0],
            row_starts=torch.from_numpy(starts),
            context_lens=torch.from_numpy(sizes),
            block_table=tables.int() if is_on_gpu else tables,
            num_decodes=int((sizes == 1).sum()),
            device_row_starts=moved[2].int() if is_on_gpu else None,
            device_context_lens=moved[3].int() if is_on_gpu else None,
        )
