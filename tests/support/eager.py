"""Runs the eager decoder of a loaded model without a worker, and transformers for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.checkpoints import VOCAB
from tests.support.paged import PagedRow, attention_batch, scattered
from worker.attention.base import Attention
from worker.attention.select import select_attention
from worker.kv.cache import make_cache
from worker.loading.decoder import LoadedModel, load_model
from worker.lora.table import AdapterTable, StepAdapters
from worker.models.base import RowModel
from worker.slots.states import StepStates
from worker.spec.kv_blocks import BlockLayers

BLOCK_TOKENS = 4
CPU = torch.device("cpu")


def load(path: Path) -> LoadedModel:
    return load_model(path, dtype=torch.float32, device=CPU)


@dataclass
class EagerStepper:
    """A model, its K/V cache, and a request with scattered blocks for each list in `tokens`.

    adapters   row of each request's adapter in `table`
    """

    loaded: LoadedModel
    tokens: list[list[int]]
    attention: Attention = field(
        default_factory=lambda: select_attention(BLOCK_TOKENS, dtype=torch.float32)
    )
    dtype: torch.dtype = torch.float32
    table: AdapterTable | None = None
    adapters: Sequence[int] = ()

    def __post_init__(self) -> None:
        config = self.loaded.spec
        sizes = [-(-len(tokens) // BLOCK_TOKENS) for tokens in self.tokens]
        layers = BlockLayers.of(config)
        self.cache = make_cache(layers, sum(sizes) + 3, BLOCK_TOKENS, self.dtype, CPU)
        self.blocks = scattered(sum(sizes) + 3, *sizes)
        self.computed = [0] * len(sizes)
        #: The recurrent state of each request, and two checkpoints.
        self.states = torch.zeros(len(sizes), config.state_items)
        self.checkpoints = torch.zeros(3, config.state_items)

    def step(self, *counts: int) -> list[Tensor]:
        """Compute the next `counts[i]` tokens of request i. Return their logits, [tokens, V]."""
        order = sorted((i for i, n in enumerate(counts) if n), key=lambda i: counts[i] > 1)
        rows = [PagedRow(self.computed[i], counts[i], self.blocks[i]) for i in order]
        ids = [t for i in order for t in self.tokens[i][self.computed[i] :][: counts[i]]]
        batch = attention_batch(rows, BLOCK_TOKENS)
        adapters = None
        if self.table is not None:
            of_tokens = np.repeat(
                [self.adapters[i] for i in order], [counts[i] for i in order]
            ).astype(np.int64)
            adapters = StepAdapters(self.table, of_tokens, CPU)
        assert not isinstance(self.loaded.model, RowModel)
        hidden = self.loaded.model(
            torch.tensor(ids),
            batch,
            self.cache,
            self.attention,
            adapters,
            self._states(rows, order),
        )
        logits = self.loaded.model.logits(hidden).split([row.count for row in rows])
        self.computed = [done + n for done, n in zip(self.computed, counts, strict=True)]
        result = [torch.empty(0, VOCAB)] * len(counts)
        for i, part in zip(order, logits, strict=True):
            result[i] = part
        return result

    def _states(self, rows: Sequence[PagedRow], order: Sequence[int]) -> StepStates | None:
        """Return the recurrent states of the requests in `order`; None if the model has none."""
        if not self.states.shape[1]:
            return None
        counts, none = np.array([row.count for row in rows], np.int64), np.empty(0, np.int64)
        return StepStates(
            self.states,
            self.checkpoints,
            slots=np.array(order, np.int64),
            starts=np.array([row.computed for row in rows], np.int64),
            firsts=counts.cumsum() - counts,
            counts=counts,
            kept=counts,
            save_rows=none,
            save_counts=none,
            save_ids=none,
        )

    def run(self, steps: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Run all steps. Return the logits of each request, [tokens, V]."""
        parts = [self.step(*counts) for counts in steps]
        return [torch.cat([part[i] for part in parts]) for i in range(len(self.tokens))]


def some_tokens(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count,), generator=generator).tolist()


@torch.inference_mode()
def expected(model: Any, tokens: list[int]) -> Tensor:
    """Return the logits of transformers, [tokens, V], computed in one forward pass."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def assert_same(ours: Tensor, theirs: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
