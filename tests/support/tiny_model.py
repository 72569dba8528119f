"""A real model of about 16,000 weights: embeddings, one attention layer, a paged cache.

Its logits depend on every earlier token and position, so a wrong token, block or length changes
them. No dimension is 13, because tests recognise per-slot tensors by that length.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from worker.attention.base import Attention, AttentionBatch
from worker.attention.torch_paged import TorchPagedAttention
from worker.device.readback import Mark, mark
from worker.draft.model import DraftModel
from worker.kv.cache import KVCache, PagedCache
from worker.lora.table import StepAdapters
from worker.sampling.base import Sampling
from worker.slots.fields import slot_fields
from worker.slots.states import StepStates
from worker.slots.table import SlotField, SlotTable
from worker.step.runner import Runner
from worker.step.slot_registry import Poison, PoisonedSlots

VOCAB = 97
MAX_LEN = 48
BLOCK_TOKENS = 4
HEADS, KV_HEADS, HEAD_DIM = 6, 3, 8
HIDDEN = HEADS * HEAD_DIM
CPU = torch.device("cpu")


class TinyModel:
    def __init__(
        self, vocab: int = VOCAB, max_len: int = MAX_LEN, device: torch.device = CPU, seed: int = 7
    ) -> None:
        random = torch.Generator().manual_seed(seed)

        def weight(*shape: int, scale: float) -> Tensor:
            return (torch.randn(shape, generator=random) * scale).to(device)

        self.embedding = weight(vocab, HIDDEN, scale=1.0)
        self.places = weight(max_len, HIDDEN, scale=0.5)
        self.query = weight(HIDDEN, HIDDEN, scale=0.3)
        self.key = weight(HIDDEN, KV_HEADS * HEAD_DIM, scale=0.3)
        self.value = weight(HIDDEN, KV_HEADS * HEAD_DIM, scale=0.3)
        self.head = weight(HIDDEN, vocab, scale=0.25)

    def __call__(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        cache: PagedCache,
        attention: Attention,
        adapters: StepAdapters | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        x = self.embedding[token_ids] + self.places[batch.positions]
        q = (x @ self.query).view(-1, HEADS, HEAD_DIM)
        k = (x @ self.key).view(-1, KV_HEADS, HEAD_DIM)
        v = (x @ self.value).view(-1, KV_HEADS, HEAD_DIM)
        cache.write(0, k, v, batch.slot_mapping)
        return x + attention.run(q, *cache.layer(0), attention.plan(batch)).flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.head).float()


def tiny_cache(num_blocks: int, device: torch.device = CPU) -> KVCache:
    return KVCache(1, num_blocks, BLOCK_TOKENS, KV_HEADS, HEAD_DIM, torch.float32, device)


def tiny_slots(
    max_slots: int,
    *,
    poison: Poison | None = None,
    kind: type[SlotTable] = SlotTable,
    device: torch.device = CPU,
    state_items: int = 0,
    num_checkpoints: int = 0,
) -> SlotTable:
    fields = slot_fields(MAX_LEN, -(-MAX_LEN // BLOCK_TOKENS), state_items)
    return new_slots(
        fields, max_slots, device, poison=poison, kind=kind, num_checkpoints=num_checkpoints
    )


def new_slots(
    fields: Iterable[SlotField],
    max_slots: int,
    device: torch.device,
    *,
    poison: Poison | None,
    kind: type[SlotTable] = SlotTable,
    num_checkpoints: int = 0,
    checkpoints: torch.Tensor | None = None,
) -> SlotTable:
    """Return a table of this kind, with or without poison in its free rows."""
    sizes = max_slots, device, num_checkpoints
    if poison is None:
        return kind(fields, *sizes, checkpoints=checkpoints)
    poisoned = type(f"Poisoned{kind.__name__}", (PoisonedSlots, kind), {})
    table: SlotTable = poisoned(fields, *sizes, checkpoints=checkpoints, poison=poison)
    return table


def tiny_runner(
    slots: SlotTable,
    cache: PagedCache,
    model: TinyModel | None = None,
    mark: Mark = mark,
    draft: TinyModel | None = None,
    kind: type[Runner] = Runner,
    sampling: Sampling | None = None,
) -> Runner:
    device = slots.device
    attention = TorchPagedAttention(BLOCK_TOKENS, torch.float32)
    draft_model = None
    if draft is not None:
        beside = tiny_cache(cache.num_blocks, device)
        draft_model = DraftModel(draft, beside, attention, VOCAB)
    target = model or TinyModel(device=device)
    return kind(
        target, slots, cache, attention, draft_model=draft_model, mark=mark, sampling=sampling
    )
