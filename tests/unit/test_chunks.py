"""Attention in chunks, on our backends, against windows that end where a chunk begins. Triton's
kernels run in its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.kernels import native_kernels
from tests.support.paged import PagedCase, PagedRow, case_of
from tests.support.triton_code import interpreted
from worker.attention.base import Attention
from worker.attention.chunks import in_chunks
from worker.attention.native_paged import NativePagedAttention
from worker.attention.reference import ReferenceAttention
from worker.attention.torch_paged import TorchPagedAttention

TRITON: Any = interpreted("worker.attention.triton_paged")
BLOCK_TOKENS, CHUNK = 16, 32
BACKENDS: dict[str, Callable[[], Attention]] = {
    "reference": ReferenceAttention,
    "torch": lambda: TorchPagedAttention(BLOCK_TOKENS, torch.float32),
    "compiled": lambda: NativePagedAttention(native_kernels(), BLOCK_TOKENS),
    "triton": lambda: TRITON.TritonPagedAttention(BLOCK_TOKENS, num_processors=2),
}
ROWS = [
    *((10, 1), (31, 1), (32, 1), (95, 1), (0, 1)),  # within a chunk, at its end and at its start
    *((0, 70), (20, 12), (20, 13), (33, 64), (32, 32), (5, 4)),
]


def expected(case: PagedCase) -> torch.Tensor:
    """Return the attention of each token alone, with a window that begins with its chunk."""
    queries = case.queries().split(1)
    found: list[torch.Tensor] = []
    for row in case.rows:
        for position in range(row.computed, row.computed + row.count):
            one = replace(case, rows=[PagedRow(position, 1, row.blocks)])
            attention = ReferenceAttention()
            plan = attention.plan(one.batch(), position % CHUNK + 1)
            found.append(attention.run(queries[len(found)], *case.cache().layer(0), plan))
    return torch.cat(found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("padding", [0, 3])
def test_a_token_sees_the_tokens_of_its_chunk_up_to_itself(backend: str, padding: int) -> None:
    case = case_of(*ROWS, block_tokens=BLOCK_TOKENS, zeroed=True)
    attention = BACKENDS[backend]()
    batch = case.batch(padding)
    if backend == "triton":
        batch = replace(
            batch,
            block_table=batch.block_table.int(),
            device_row_starts=batch.row_starts.int(),
            device_context_lens=batch.context_lens.int(),
        )
    plan = attention.plan(in_chunks(batch, CHUNK, BLOCK_TOKENS))
    found = attention.run(case.queries(), *case.cache().layer(0), plan)
    torch.testing.assert_close(found, expected(case), rtol=0, atol=2e-5)


def test_a_text_of_one_chunk_has_the_rows_that_it_had() -> None:
    batch = case_of((4, 1), (0, 20), block_tokens=BLOCK_TOKENS).batch()
    same = in_chunks(batch, 64, BLOCK_TOKENS)
    assert torch.equal(same.row_starts, batch.row_starts)
    assert torch.equal(same.context_lens, batch.context_lens)
    assert torch.equal(same.block_table, batch.block_table)
