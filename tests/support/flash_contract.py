"""A twin of `flash_attn_varlen_func` in torch: it computes the same result, and refuses each call
that breaks the contract of a FlashAttention library.

A library does not check most of this. A wrong call would read wrong memory on a GPU, silently. The
rules come from the libraries' documentation and messages, not from worker/attention/limits.py.

Legend: T tokens in the step, R rows, M columns of the block table, B blocks, H query heads, H_kv
key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from worker.attention.base import AttentionBatch

NO_WINDOW = (-1, -1)


class ContractBroken(AssertionError):
    """A call that the library does not support. The message names the rule."""


@dataclass(frozen=True, kw_only=True)
class LibraryRules:
    """Rules in which the libraries differ."""

    block_multiple: int
    #: Most query heads of a call with sinks; 0: no sinks.
    max_sink_heads: int
    has_soft_cap: bool
    #: The values of `num_splits` that are allowed if a row has several queries, and if none has.
    splits: Sequence[int]
    splits_of_decodes: Sequence[int]


FA3 = LibraryRules(
    block_multiple=1,
    max_sink_heads=64,
    has_soft_cap=True,
    splits=range(257),
    splits_of_decodes=range(257),
)
FA2 = LibraryRules(
    block_multiple=16,
    max_sink_heads=0,
    has_soft_cap=True,
    splits=[1],
    splits_of_decodes=[0, 1],
)
VARLEN = LibraryRules(
    block_multiple=256, max_sink_heads=0, has_soft_cap=False, splits=[1], splits_of_decodes=[1]
)


@dataclass
class FlashContract:
    """The twin of one library. It has the arguments of `flash_attn_varlen_func`."""

    rules: LibraryRules
    #: The arguments of all calls.
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] | None = None,
        softcap: float = 0.0,
        block_table: Tensor | None = None,
        num_splits: int = 0,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        given = {name: value for name, value in locals().items() if name != "self"}
        self.calls.append(given)
        check(cu_seqlens_k is None, "`cu_seqlens_k` and `seqused_k` exclude each other")
        if seqused_k is None or block_table is None:
            raise ContractBroken("the call is paged")
        check(isinstance(causal, bool) and causal, "the call is causal")
        check_numbers(q, k, v)
        check(k.shape[1] % self.rules.block_multiple == 0, "block size of the library")
        check_tables(q, k, cu_seqlens_q, seqused_k, block_table)
        check_lengths(cu_seqlens_q.tolist(), seqused_k.tolist(), max_seqlen_q, max_seqlen_k)
        splits = self.rules.splits if max_seqlen_q > 1 else self.rules.splits_of_decodes
        check(num_splits in splits, "number of splits")
        window = NO_WINDOW if window_size is None else window_size
        check(window == NO_WINDOW or (window[0] >= 0 and window[1] == 0), "window")
        check(isinstance(softcap, float) and softcap >= 0, "soft cap")
        check(self.rules.has_soft_cap or softcap == 0, "the library has no soft cap")
        self._check_sinks(q, s_aux)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        check(isinstance(scale, float) and scale > 0, "scale")
        out = torch.full_like(q, float("nan"))  # queries after those of the last row
        group = q.shape[1] // k.shape[2]
        for row, (start, stop) in enumerate(cu_seqlens_q.unfold(0, 2, 1).tolist()):
            keys, values, hidden = visible(
                k, v, block_table[row], stop - start, int(seqused_k[row]), window[0]
            )
            keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(hidden, float("-inf"))
            out[start:stop] = weighted(scores, s_aux, values).to(q.dtype)
        return out

    def _check_sinks(self, q: Tensor, sinks: Tensor | None) -> None:
        if sinks is None:
            return
        check(self.rules.max_sink_heads > 0, "the library has no sinks")
        check(q.shape[1] <= self.rules.max_sink_heads, "heads of a call with sinks")
        check(sinks.dtype == torch.bfloat16, "dtype of the sinks")
        check(sinks.shape == q.shape[1:2] and sinks.is_contiguous(), "shape of the sinks")
        check(sinks.device == q.device, "device of the sinks")


def check(condition: bool, rule: str) -> None:
    if not condition:
        raise ContractBroken(rule)


def check_numbers(q: Tensor, k: Tensor, v: Tensor) -> None:
    check(q.dtype in (torch.bfloat16, torch.float16), "dtype of the queries")
    check(k.dtype == v.dtype == q.dtype, "dtype of keys and values")
    check(q.dim() == 3 and k.dim() == 4 and k.shape == v.shape, "shape")
    check(k.device == v.device == q.device, "device of keys and values")
    check(q.shape[2] == k.shape[3], "head dim of the keys")
    check(q.shape[2] % 8 == 0 and q.shape[2] <= 256, "head dim of the library")
    check(q.shape[1] % k.shape[2] == 0, "query heads per key head")
    for name, tensor in (("queries", q), ("keys", k), ("values", v)):
        check(tensor.stride(-1) == 1, f"last dimension of the {name}")
        steps = [stride * tensor.itemsize for stride in tensor.stride()[:-1]]
        check(all(step % 16 == 0 for step in steps), f"alignment of the {name}")
        check(tensor.data_ptr() % 16 == 0, f"address of the {name}")


def check_tables(q: Tensor, k: Tensor, starts: Tensor, lens: Tensor, table: Tensor) -> None:
    for name, tensor in (("`cu_seqlens_q`", starts), ("`seqused_k`", lens), ("block table", table)):
        check(tensor.dtype == torch.int32, f"dtype of the {name}")
        check(tensor.device == q.device, f"device of the {name}")
        check(tensor.stride(-1) == 1, f"last dimension of the {name}")
    check(starts.dim() == lens.dim() == 1 and table.dim() == 2, "shape of the tables")
    check(len(table) == len(lens) == len(starts) - 1, "rows of the tables")
    check(int(starts[0]) == 0 and bool((starts.diff() >= 0).all()), "order of `cu_seqlens_q`")
    check(int(starts[-1]) <= len(q), "number of queries")
    num_blocks, block_tokens = k.shape[:2]
    needed = -(-lens // block_tokens)
    check(int(needed.max()) <= table.shape[1], "columns of the block table")
    is_used = torch.arange(table.shape[1]) < needed[:, None]
    blocks = table[is_used]
    check(bool(((blocks >= 0) & (blocks < num_blocks)).all()), "range of the block table")


def check_lengths(starts: list[int], lens: list[int], max_queries: int, max_context: int) -> None:
    counts = [stop - start for start, stop in pairwise(starts)]
    check(type(max_queries) is type(max_context) is int, "type of the maxima")
    check(max(counts) <= max_queries, "most queries of a row")
    check(max(lens) <= max_context, "longest context")
    pairs = zip(counts, lens, strict=True)
    check(all(n in (0, max(n, count)) for count, n in pairs), "queries beyond a context")


def visible(
    k: Tensor, v: Tensor, blocks: Tensor, num_queries: int, context: int, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values [N, H_kv, D] that a row's queries see, and the mask
    [num_queries, N] of those that each query does not see."""
    last = torch.arange(context - num_queries, context)[:, None]
    first = 0 if window < 0 else max(context - num_queries - window, 0)
    positions = torch.arange(first, context)
    page = k.shape[1]
    seen = blocks[positions // page].long()
    check(bool((seen > 0).all()), "no query sees the null block")
    hidden = positions > last
    if window >= 0:
        hidden |= positions < last - window
    return k[seen, positions % page].float(), v[seen, positions % page].float(), hidden


def weighted(scores: Tensor, sinks: Tensor | None, values: Tensor) -> Tensor:
    """Return the attention [n, H, D] for scores [H, n, N] and values [N, H, D]. It is zero if N is
    0, as in the rows that pad a step."""
    if sinks is None:
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, values)


def on_device(batch: AttentionBatch, device: torch.device | None = None) -> AttentionBatch:
    """Return the batch with the tables that it has on a GPU. They are in the memory of `device`, by
    default the CPU."""
    return replace(
        batch,
        positions=batch.positions.to(device),
        slot_mapping=batch.slot_mapping.to(device),
        block_table=batch.block_table.to(device, torch.int32),
        device_row_starts=batch.row_starts.to(device, torch.int32),
        device_context_lens=batch.context_lens.to(device, torch.int32),
        further=tuple(on_device(each, device) for each in batch.further),
    )


@contextmanager
def registered(
    namespace: str, schema: str, kernel: Callable[..., list[Tensor]] | None = None
) -> Iterator[None]:
    """Register an operator with torch while the context lasts.

    kernel   its implementation for the CPU; None: it has none
    """
    library = Library(namespace, "DEF")
    try:
        library.define(schema)
        if kernel is not None:
            library.impl(schema.partition("(")[0], kernel, "CPU")
        yield
    finally:
        del library  # ends the registration


FA3_SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k) -> Tensor[]"
)
FA2_SCHEMA = (
    "varlen_fwd(Tensor! q, Tensor k, Tensor v, Tensor!? out, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, "
    "Tensor? alibi_slopes, int max_seqlen_q, int max_seqlen_k, float p_dropout, "
    "float softmax_scale, bool zero_tensors, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool return_softmax, int num_splits, Tensor? gen) "
    "-> Tensor[]"
)
"""The operators' schemas, as the libraries of vLLM 0.33.0 register them."""


def fa3_kernel(contract: FlashContract) -> Callable[..., list[Tensor]]:
    """Return an implementation of the operator of FA3_SCHEMA that calls the twin."""

    def fwd(*values: Any) -> list[Tensor]:
        (q, k, v, *appended, out, starts, starts_k, starts_new, used_q, lens) = values[:12]
        (max_q, max_k, table, *row_options, scale, causal, left, right, cap) = values[12:28]
        interleaved, metadata, splits, pack, margin, sinks, world, rank, total = values[28:]
        unused = [*appended, out, starts_new, used_q, *row_options, metadata, pack, total]
        check(all(each is None for each in unused), "arguments without a use here")
        check((interleaved, margin, world, rank) == (True, 0, 1, 0), "fixed arguments")
        result = contract(
            *(q, k, v, max_q, starts, max_k, starts_k, lens, scale, causal, (left, right), cap),
            *(table, splits, sinks),
        )
        return [result, q.new_empty(0), q.new_empty(0), q.new_empty(0)]

    return fwd


def fa2_kernel(contract: FlashContract) -> Callable[..., list[Tensor]]:
    """Return an implementation of the operator of FA2_SCHEMA that calls the twin."""

    def varlen_fwd(*values: Any) -> list[Tensor]:
        (q, k, v, out, starts, starts_k, lens, leftpad, table, slopes, max_q, max_k) = values[:12]
        dropout, scale, zeros, causal, left, right, cap, softmax, splits, gen = values[12:]
        check(out is leftpad is slopes is gen is None, "arguments without a use here")
        check((dropout, zeros, softmax) == (0.0, False, False), "fixed arguments")
        check(starts_k.dtype == torch.int32 and starts_k.shape == starts.shape, "`cu_seqlens_k`")
        result = contract(
            *(q, k, v, max_q, starts, max_k, None, lens, scale, causal, (left, right), cap),
            *(table, splits),
        )
        return [result, q.new_empty(0)]

    return varlen_fwd


def varlen_attn(contract: FlashContract) -> Callable[..., Tensor]:
    """Return a function with the arguments of torch's `varlen_attn` that calls the twin."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = NO_WINDOW,
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        check(enable_gqa or query.shape[1] == key.shape[2], "grouped heads")
        check(window_size[1] == 0, "the call is causal")
        window = NO_WINDOW if window_size[0] < 0 else window_size
        splits = 0 if num_splits is None else num_splits
        return contract(
            *(query, key, value, max_q, cu_seq_q, max_k, None, seqused_k, scale, True, window),
            block_table=block_table,
            num_splits=splits,
        )

    return attend
