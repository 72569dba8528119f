"""Compares our Triton attention with FlashAttention libraries: results and times.

The shape is that of Qwen3-8B. A rehearsal has smaller rows, the twin of a library
(tests/support/flash_contract.py), and float16, because Triton's interpreter cannot multiply
bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.gpu.session import GpuSession
from tests.gpu.table import GpuRow, NotPossible, checked, figure, not_run
from tests.gpu.timing import best_s
from tests.support.flash_contract import FA3 as FA3_RULES
from tests.support.flash_contract import FlashContract, on_device
from tests.support.paged import PagedRow, attention_batch, scattered
from tools.libraries.catalogue import library_folder
from tools.models.fetch import home
from worker.attention.base import Attention, AttentionBatch
from worker.attention.flash import FlashPagedAttention
from worker.attention.flash_library import FA2, FA3, VARLEN, FlashLibrary, installed_folders
from worker.attention.limits import NoBackend
from worker.loading.header import ModelHeader, read_header
from worker.spec.model_spec import ModelSpec
from worker.startup.attention_needs import attention_needs

TOLERANCE = 1.6e-2
"""Largest difference of results in bfloat16, relative to the largest number."""
BLOCK_TOKENS = {VARLEN.name: 256}
USUAL_BLOCK = 16
MIXED = [(1023, 1), (17, 1), (0, 300), (400, 77), (5, 2)]
"""(computed, new) tokens of rows with all kinds of lengths."""
TIMED = {
    "decode, 1 x 1,024": [(1023, 1)],
    "decode, 64 x 1,024": [(1023, 1)] * 64,
    "decode, 256 x 1,024": [(1023, 1)] * 256,
    "prefill, 8,192": [(0, 8192)],
}
SHARE = 0.8


@dataclass(frozen=True)
class AttentionScene:
    """Random rows on the device."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: AttentionBatch

    @classmethod
    def of(
        cls, session: GpuSession, rows: Sequence[tuple[int, int]], block_tokens: int
    ) -> AttentionScene:
        """Return rows of (computed, new) tokens, decodes first, whose blocks are scattered."""
        spec, device = spec_of(session), session.device
        rows = session.choose(rows, [(c % 40, min(n, 9)) for c, n in rows[:3]])
        sizes = [-(-sum(row) // block_tokens) for row in rows]
        num_blocks = sum(sizes) + 1
        placed = [
            PagedRow(*row, own)
            for row, own in zip(rows, scattered(num_blocks, *sizes), strict=True)
        ]
        heads, dtype = spec.attentions[0].num_heads, session.choose(torch.bfloat16, torch.float16)
        shape = (num_blocks, block_tokens, spec.layer_heads[0].count, spec.layer_heads[0].dim)
        queries = (sum(new for _, new in rows), heads, spec.layer_heads[0].dim)
        q, k, v = (torch.randn(s, device=device).to(dtype) for s in (queries, shape, shape))
        return cls(q, k, v, on_device(attention_batch(placed, block_tokens), device))

    def attend(self, attention: Attention, window: int | None = None) -> Tensor:
        return attention.run(self.q, self.k, self.v, attention.plan(self.batch, window))

    def seconds(self, session: GpuSession, attention: Attention) -> float:
        plan = attention.plan(self.batch)
        return best_s(session, lambda: attention.run(self.q, self.k, self.v, plan))


def spec_of(session: GpuSession) -> ModelSpec:
    header = read_header(session.config("qwen3-8b"))
    assert isinstance(header, ModelHeader)
    return header.spec


def our_attention(session: GpuSession, block_tokens: int) -> Attention:
    module = session.triton("worker.attention.triton_paged")
    processors = 8
    if not session.is_rehearsal:
        processors = torch.cuda.get_device_properties(session.device).multi_processor_count
    ours: Attention = module.TritonPagedAttention(block_tokens, num_processors=processors)
    return ours


def library_attention(session: GpuSession, library: FlashLibrary) -> Attention:
    """Return the attention of a library. Raises NotPossible with the reason if there is none."""
    if session.is_rehearsal:
        return FlashPagedAttention(FlashContract(FA3_RULES))
    needs = attention_needs(
        spec_of(session),
        session.device,
        block_tokens=BLOCK_TOKENS.get(library.name, USUAL_BLOCK),
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
    )
    assert needs is not None
    if reason := library.limits.reason_against(needs):
        raise NotPossible(reason)
    folders: list[Path] = [library_folder(home()), *installed_folders()]
    try:
        return FlashPagedAttention(library.load(folders))
    except NoBackend as error:
        raise NotPossible(str(error)) from None


def check_libraries(session: GpuSession) -> Iterator[GpuRow]:
    """Yield whether each library computes what our attention computes."""
    for library in (FA3, FA2, VARLEN):
        name = f"{library.name} against ours"
        try:
            theirs = library_attention(session, library)
        except NotPossible as error:
            yield not_run(name, str(error))
            continue
        block_tokens = BLOCK_TOKENS.get(library.name, USUAL_BLOCK)
        scene = AttentionScene.of(session, MIXED, block_tokens)
        ours = our_attention(session, block_tokens)
        error_of = {
            window: _difference(scene.attend(ours, window), scene.attend(theirs, window))
            for window in (None, 100)
        }
        worst = max(error_of.values())
        is_right = all(each <= TOLERANCE for each in error_of.values())
        yield checked(name, f"differ by {worst:.1e} of the largest number", is_right=is_right)


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest number; NaN if there is a NaN."""
    one, other = one.float(), other.float()
    return float((one - other).abs().max() / other.abs().max())


def time_attention(session: GpuSession) -> Iterator[GpuRow]:
    """Yield the times of one layer's attention, ours and FA3's."""
    ours = our_attention(session, USUAL_BLOCK)
    theirs, reason = None, ""
    try:
        theirs = library_attention(session, FA3)
    except NotPossible as error:
        reason = str(error)
    for name, rows in TIMED.items():
        scene = AttentionScene.of(session, rows, USUAL_BLOCK)
        our_s = scene.seconds(session, ours)
        yield figure(f"{name}: ours", our_s * 1e6, "us")
        if theirs is None:
            yield not_run(f"{name}: FA3", reason)
            continue
        their_s = scene.seconds(session, theirs)
        share = figure(f"{name}: speed of ours", 100 * their_s / our_s, "%", at_least=100 * SHARE)
        yield figure(f"{name}: FA3", their_s * 1e6, "us")
        yield share
