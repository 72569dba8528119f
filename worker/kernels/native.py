"""Calls the compiled kernels, which receive addresses and sizes and write results into tensors.

Every function checks what the C++ code assumes (contiguous memory, one dtype, matching sizes),
because a wrong address crashes the process. Legend in base.py.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.kernels import structs
from worker.kernels.addresses import address, cache_address
from worker.kernels.attention_structs import indexed_tokens_struct
from worker.kernels.native_recurrence import NativeRecurrence
from worker.kernels.reference import TorchKernels, heads_of, norm_heads, scaled
from worker.kv.cache import PagedCache
from worker.kv.rounding import ROUNDED, stored_width
from worker.layers.norm import Norm
from worker.layers.rope import CosSin
from worker.spec.kernel_sizes import SIZE_MULTIPLE
from worker.spec.model_spec import MlpSpec

IS_FLOAT, IS_BFLOAT16 = 0, 1
DTYPE_CODES = {torch.float32: IS_FLOAT, torch.bfloat16: IS_BFLOAT16}
AS_NUMBERS, AS_ROUNDED, AS_BFLOAT16 = 0, 1, 2
"""How a cache stores keys and values: StoredAs in csrc/stored_kv.h."""

SIGNATURES = {
    "source_digest": "",
    "bits_of_set": "ii",
    "time_parts": "p",
    "add_norm": "iiiippppd",
    "activate": "iiiippp",
    "add_low_rank": "iipiiiipipi",
    "sigmoids": "iiiipip",
    "cap_logits": "iiipd",
    "gated_delta": "ipppipipp",
    "mamba1_conv": "iiipipppip",
    "mamba1_scan": "iiipippp",
    "mamba2": "ipppipip",
    "rg_lru_conv": "iiipipppip",
    "rg_lru_scan": "iiiipippp",
    "short_conv": "iiipipppip",
    "place_kv": "iiiipppppppii",
    "paged_attention": "iiipppippipp",
    "index_scores": "iiippppp",
    "linear_to_float": "iipipp",
    "linear_same": "iipippp",
    "linear_heads": "iiipipp",
    "forward": "iip",
    "logits": "iippipp",
    "decode": "iip",
    "sample": "ipiipppipp",
    "packed_bytes": "iii",
    "pack_blocks": "iipiip",
    "gather_rows": "iippip",
    "pack_dense": "iipiip",
}
"""Types of the arguments in kernels.cpp: i int64, p address, d double."""
RETURNS_INT = {
    *("source_digest", "bits_of_set", "packed_bytes", "decode"),
    *("gated_delta", "mamba1_conv", "mamba1_scan", "mamba2"),
    *("rg_lru_conv", "rg_lru_scan", "short_conv"),
}
"""Functions that return an int64; the others return nothing."""
_TYPES: dict[str, Any] = {"i": ctypes.c_int64, "p": ctypes.c_void_p, "d": ctypes.c_double}


def declare(library: ctypes.CDLL) -> None:
    """Declare the argument and result types of the library's functions to ctypes."""
    for name, letters in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [_TYPES[letter] for letter in letters]
        function.restype = ctypes.c_int64 if name in RETURNS_INT else None


def activation_struct(mlp: MlpSpec) -> structs.CActivation:
    kind = structs.ACTIVATION_KINDS.index(mlp.activation)
    own = mlp.xielu
    assert (mlp.activation == "xielu") == (own is not None)
    assert own is None or not mlp.is_gated
    xielu = () if own is None else (own.positive, own.negative, own.beta, own.eps)
    return structs.CActivation(kind, mlp.is_gated, mlp.alpha, mlp.limit, *xielu)


class NativeKernels(NativeRecurrence):
    """The `Kernels` (base.py) of one compiled library, and its attention. Operations that it does
    not have are torch's."""

    def __init__(self, name: str, library: ctypes.CDLL, file: Path) -> None:
        declare(library)
        self._torch = TorchKernels()
        self.name = name
        self.library = library
        self.file = file

    def cos_sin(
        self, positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, factor: float
    ) -> CosSin:
        return self._torch.cos_sin(positions, inv_freq, dtype, factor)

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: Norm | None,
        *,
        post_norm: Norm | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        if norm is None or not norm.is_plain or norm.weight.numel() % SIZE_MULTIPLE:
            return self._torch.add_norm(x, delta, norm, post_norm=post_norm, scale=scale)
        if delta is not None:
            delta = scaled(delta, post_norm, scale)
        rows, size = x.shape
        assert norm.weight.shape == (size,)
        assert delta is None or delta.shape == x.shape
        out = torch.empty_like(x)
        self.library.add_norm(
            dtype_code(x, norm.weight),
            torch.get_num_threads(),
            rows,
            size,
            *map(address, (x, delta, norm.weight, out)),
            norm.spec.eps,
        )
        return out

    def place(
        self,
        qkv: Tensor,
        cos_sin: CosSin | None,
        cache: PagedCache,
        layer: int,
        slot_mapping: Tensor,
        *,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> Tensor:
        """Do as `Kernels.place` says. No entry of `slot_mapping` may be negative."""
        own = cache.heads(layer)
        kv_heads, head_dim = own.count, own.dim
        if cos_sin is None or cos_sin[0].shape[-1] != head_dim:
            return self._torch.place(
                qkv, cos_sin, cache, layer, slot_mapping, q_norm=q_norm, k_norm=k_norm
            )
        k, v = cache.layer(layer)
        all_heads = heads_of(qkv, head_dim)
        heads = all_heads.shape[1] - 2 * kv_heads
        norm_heads(all_heads[:, :heads], q_norm)
        norm_heads(all_heads[:, heads:-kv_heads], k_norm)
        assert slot_mapping.shape == (len(qkv),) == cos_sin[0].shape[:1]
        self.library.place_kv(
            dtype_code(qkv, *cos_sin),
            stored_as(k, v, qkv.dtype, head_dim),
            torch.get_num_threads(),
            len(qkv),
            byref(structs.CHeads(heads, kv_heads, head_dim)),
            *map(address, (qkv, *cos_sin, slot_mapping)),
            *map(cache_address, (k, v)),
            cache.block_tokens,
            k.stride(0),
        )
        return all_heads[:, :heads]

    def activate(self, inner: Tensor, mlp: MlpSpec) -> Tensor:
        out = inner.new_empty(len(inner), inner.shape[1] // (2 if mlp.is_gated else 1))
        self.library.activate(
            dtype_code(inner),
            torch.get_num_threads(),
            *out.shape,
            byref(activation_struct(mlp)),
            address(inner),
            address(out),
        )
        return out

    def add_low_rank(
        self, adapters: structs.CStepAdapters, place: tuple[int, int, int], x: Tensor, y: Tensor
    ) -> None:
        """Add the terms of a step's adapters to the result of a linear, in place.

        place   number of layers, and the numbers of the layer and of its linear
        x, y    [T, inputs] and [T, outputs], of the model's dtype
        """
        assert x.dtype == y.dtype
        self.library.add_low_rank(
            dtype_code(x),
            torch.get_num_threads(),
            byref(adapters),
            len(x),
            *place,
            address(x),
            x.shape[1],
            address(y),
            y.shape[1],
        )

    def sigmoid(self, x: Tensor) -> Tensor:
        assert x.stride(1) == 1
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.library.sigmoids(
            dtype_code(x),
            torch.get_num_threads(),
            *x.shape,
            x.data_ptr(),
            x.stride(0),
            address(out),
        )
        return out

    def cap_logits(self, logits: Tensor, cap: float) -> Tensor:
        assert logits.dtype == torch.float32
        self.library.cap_logits(torch.get_num_threads(), *logits.shape, address(logits), cap)
        return logits

    def index_scores(
        self,
        queries: Tensor,
        weights: Tensor,
        index_keys: Tensor,
        block_table: Tensor,
        rows: Tensor,
        visible: Tensor,
    ) -> Tensor:
        (count, heads, dim), width = queries.shape, int(visible.max())
        assert weights.shape == (count, heads)
        assert weights.dtype == torch.float32
        scores = weights.new_empty(count, width)
        self.library.index_scores(
            dtype_code(queries),
            stored_as(index_keys, index_keys, queries.dtype, dim),
            torch.get_num_threads(),
            byref(indexed_tokens_struct(queries, index_keys, block_table, rows, visible)),
            *map(address, (queries, weights)),
            cache_address(index_keys),
            address(scores),
        )
        return scores

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, rows: structs.CRows, scoring: structs.CScoring
    ) -> Tensor:
        """Return the attention output [T, H, D] of one layer, as `Attention.run` does.

        q        [T, H, D]; may be a slice of wider rows, such as qkv
        k, v     the layer's caches, [B, block_tokens, H_kv, stored_width]; other layers may lie
                 between two of their blocks
        """
        tokens, heads, head_dim = q.shape
        assert q.stride()[1:] == (head_dim, 1)
        out = q.new_empty(tokens, heads, head_dim)
        self.library.paged_attention(
            dtype_code(q),
            stored_as(k, v, q.dtype, head_dim),
            torch.get_num_threads(),
            byref(structs.CHeads(heads, k.shape[2], head_dim)),
            byref(rows),
            q.data_ptr(),
            q.stride(0),
            *map(cache_address, (k, v)),
            k.stride(0),
            address(out),
            byref(scoring),
        )
        return out


def stored_as(k: Tensor, v: Tensor, dtype: torch.dtype, head_dim: int) -> int:
    """Return how caches [..., stored_width] store keys and values of a model in `dtype`, a number
    of StoredAs in csrc/stored_kv.h.

    Raises ValueError if they store neither rounded numbers nor numbers in `dtype` or bfloat16, or
    if their width does not match `head_dim`.
    """
    for cache in (k, v):
        if cache.shape[-1] != stored_width(head_dim, cache.dtype) or cache.dtype != k.dtype:
            shape = tuple(cache.shape)
            raise ValueError(
                f"a K/V cache {shape} of {cache.dtype} does not store heads of {head_dim} numbers"
            )
    if k.dtype == dtype:
        return AS_NUMBERS
    if k.dtype not in (ROUNDED, torch.bfloat16):
        raise ValueError(f"kernels in {dtype} cannot read a cache in {k.dtype}")
    return AS_ROUNDED if k.dtype == ROUNDED else AS_BFLOAT16


def dtype_code(*tensors: Tensor) -> int:
    """Return the kernels' code (DTYPE_CODES) of the dtype that all tensors have.

    Raises ValueError if the dtypes differ or are not supported by the kernels.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not dtypes <= DTYPE_CODES.keys():
        raise ValueError(f"kernels support {list(DTYPE_CODES)}, not {dtypes}")
    return DTYPE_CODES[dtypes.pop()]
