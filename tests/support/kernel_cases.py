"""Computations with the functions of the compiled kernels, for golden numbers.

All inputs are made of integers (hashed.py), and torch only copies them, or computes operations that
have one correctly rounded result. So the bits of the results are those of the kernels alone.

Legend: T tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from protocol.engine.sampling import SamplingParams
from tests.support.hashed import hashed
from tests.support.kernels import randn, random_blocks
from tests.support.paged import PagedCase, PagedRow, attention_batch, case_of, scattered
from tests.support.recurrent_steps import (
    RecurrentLayer,
    StepRow,
    conv_layer,
    delta_layer,
    lru_layer,
    mamba1_layer,
    mamba_layer,
    recurrent_requests,
)
from tests.support.sampled_rows import RowRequest, bind_rows
from worker.attention.native_paged import NativePagedAttention
from worker.checkpoint.quant_blocks import BlockKind
from worker.kernels.native import DTYPE_CODES, NativeKernels
from worker.kernels.packed import PackedEmbedding, PackedHeads, PackedLinear, PackedPart, pack
from worker.kv.cache import KVCache
from worker.kv.rounding import ROUNDED
from worker.layers.norm import Norm
from worker.lora.adapter import Adapter, LowRankPart, LowRankTerm
from worker.lora.table import AdapterTable, StepAdapters
from worker.sampling.native_sampling import NativeSampling
from worker.spec.model_spec import Activation, MlpSpec, NormSpec, Xielu

CPU = torch.device("cpu")
FLOAT, BFLOAT16 = torch.float32, torch.bfloat16
OUTPUTS, INPUTS, ROWS = 70, 512, 13
KV_DTYPES = {
    FLOAT: {"": FLOAT, ", stored as bfloat16": BFLOAT16, ", stored as int8": ROUNDED},
    BFLOAT16: {"": BFLOAT16, ", stored as int8": ROUNDED},
}
"""Dtype of a model -> how its cache can store keys and values."""


Compute = Callable[[NativeKernels], Sequence[Tensor]]
"""Computes results, which the kernels alone determine."""


@dataclass(frozen=True)
class KernelCase:
    """A computation whose results have the same bits on each instruction set that promises it.

    functions       functions of kernels.cpp of which these are results; (): of many
    name            tells the case from the others of these functions
    dtype           dtype of the model
    rounds_inputs   whether inputs of matrices are rounded to eight bits, or there are no matrices
    """

    functions: tuple[str, ...]
    name: str
    compute: Compute
    dtype: torch.dtype = FLOAT
    rounds_inputs: bool = True

    @property
    def key(self) -> str:
        of_inputs = "" if self.rounds_inputs else ", inputs as they are"
        of_dtype = "" if self.dtype is FLOAT else ", in bfloat16"
        return f"{', '.join(self.functions) or 'layers'}: {self.name}{of_inputs}{of_dtype}"

    def is_promised(self, kernels: NativeKernels) -> bool:
        """Return whether these kernels promise the bits of other instruction sets."""
        bits: int = kernels.library.bits_of_set(DTYPE_CODES[self.dtype], self.rounds_inputs)
        return bits == 0


def function_cases() -> Iterator[KernelCase]:
    """Yield the cases of all functions but those that compute whole steps."""
    matrices = random_matrices()
    for dtype in (FLOAT, BFLOAT16):
        for rounds_inputs in (True, False):
            yield from linear_cases(matrices, dtype, rounds_inputs)
        yield from row_cases(dtype)
        yield from cache_cases(dtype)
    yield from recurrent_cases()
    yield KernelCase(("cap_logits",), "1,000 numbers", capped)
    yield KernelCase(("sample",), "parameters of several kinds", sampled)


def numbers(*shape: int, dtype: torch.dtype, seed: int = 5) -> Tensor:
    """Return numbers of several sizes, up to about 100."""
    sizes = torch.from_numpy(1 << (hashed(*shape, seed=seed + 1) % 6).astype(np.int64))
    return (randn(*shape, dtype=FLOAT, seed=seed) * sizes).to(dtype)


# ---- Matrices.


def random_matrices() -> dict[str, tuple[PackedPart, ...]]:
    """Return a matrix of each kind of blocks, and one of several parts."""
    return {
        **{kind.name: (random_blocks(kind, OUTPUTS, INPUTS),) for kind in BlockKind},
        "several parts": (
            random_blocks(BlockKind.Q2_K, 38, INPUTS),
            randn(21, INPUTS, dtype=FLOAT, seed=1),
            random_blocks(BlockKind.Q4_1, 16, INPUTS),
            randn(33, INPUTS, dtype=BFLOAT16, seed=2),
        ),
    }


def linear_cases(
    matrices: Mapping[str, tuple[PackedPart, ...]], dtype: torch.dtype, rounds_inputs: bool
) -> Iterator[KernelCase]:
    x = numbers(ROWS, INPUTS, dtype=dtype)
    ids = torch.tensor([0, OUTPUTS - 1, 7, 7, 33])

    def packed(kernels: NativeKernels, *parts: PackedPart) -> PackedLinear:
        return PackedLinear(kernels, pack(kernels, *parts, rounds_inputs=rounds_inputs))

    def case(function: str, name: str, compute: Compute) -> KernelCase:
        return KernelCase((function,), name, compute, dtype, rounds_inputs)

    def biased(kernels: NativeKernels) -> list[Tensor]:
        linear = packed(kernels, *matrices["Q4_K"])
        linear.bias = randn(OUTPUTS, dtype=dtype, seed=3)
        return [linear(x)]

    def by_head(kernels: NativeKernels) -> list[Tensor]:
        heads = [random_blocks(BlockKind.Q8_0, 48, 96, seed=head) for head in range(5)]
        linears = PackedHeads([packed(kernels, head) for head in heads])
        return [linears(numbers(5, ROWS, 96, dtype=dtype))]

    yield case("linear_same", "with a bias", biased)
    yield case("linear_heads", "five heads", by_head)
    for name, parts in matrices.items():

        def to_float(kernels: NativeKernels, parts: tuple[PackedPart, ...] = parts) -> list[Tensor]:
            linear = packed(kernels, *parts)
            return [linear.to_float(x), linear.to_float(x[:1])]

        def gathered(kernels: NativeKernels, parts: tuple[PackedPart, ...] = parts) -> list[Tensor]:
            return [PackedEmbedding(kernels, packed(kernels, *parts).matrix, dtype)(ids)]

        yield case("linear_to_float", name, to_float)
        if rounds_inputs:  # it has no inputs
            yield case("gather_rows", name, gathered)


# ---- Operations on each row.


def row_cases(dtype: torch.dtype) -> Iterator[KernelCase]:
    for width in (96, 1040):

        def normed(kernels: NativeKernels, width: int = width) -> list[Tensor]:
            x, delta = (numbers(ROWS, width, dtype=dtype, seed=seed) for seed in (7, 9))
            norm = Norm(NormSpec(eps=1e-5), randn(width, dtype=dtype, seed=3))
            return [kernels.add_norm(x, None, norm), kernels.add_norm(x, delta, norm), x]

        yield KernelCase(("add_norm",), f"{width} numbers", normed, dtype)
    for activation in get_args(Activation):
        for is_gated in (True, False):
            if activation == ("xielu" if is_gated else "clamped_swiglu"):
                continue
            mlp = MlpSpec(
                intermediate=160,
                activation=activation,
                is_gated=is_gated,
                alpha=1.7,
                limit=0.8,
                xielu=Xielu(1.3, 0.9, 0.5, -1e-2) if activation == "xielu" else None,
            )

            def activated(kernels: NativeKernels, mlp: MlpSpec = mlp) -> list[Tensor]:
                return [kernels.activate(numbers(ROWS, 320, dtype=dtype), mlp)]

            name = f"{activation}{', gated' * is_gated}"
            yield KernelCase(("activate",), name, activated, dtype)

    def sigmoids(kernels: NativeKernels) -> list[Tensor]:
        return [kernels.sigmoid(numbers(ROWS, 133, dtype=dtype)[:, 2:])]

    def adapted(kernels: NativeKernels) -> list[Tensor]:
        def of_rank(rank: int, widths: Sequence[int]) -> Adapter:
            ups = [randn(rank, n, dtype=dtype, seed=rank + n) for n in widths]
            starts = [sum(widths[:i]) for i in range(len(widths))]
            parts = [
                LowRankPart(rank * i, start, 2.0 / 3.0, up)
                for i, (start, up) in enumerate(zip(starts, ups, strict=True))
            ]
            down = randn(rank * len(parts), 208, dtype=dtype, seed=rank)
            return Adapter("", rank, {(0, "qkv"): LowRankTerm(down, tuple(parts))})

        table = AdapterTable(2, 1)
        table.add(0, 1, of_rank(11, (300, 20, 43)))
        table.add(1, 1, of_rank(3, (363,)))
        terms = StepAdapters(table, np.array([0, -1, 1, 1, 0]), CPU).for_layer(0, kernels)
        y = numbers(5, 363, dtype=dtype, seed=21)
        terms("qkv", numbers(5, 208, dtype=dtype), y)
        return [y]

    yield KernelCase(("sigmoids",), "columns of wider rows", sigmoids, dtype)
    yield KernelCase(("add_low_rank",), "adapters of two ranks", adapted, dtype)


def capped(kernels: NativeKernels) -> list[Tensor]:
    return [kernels.cap_logits(numbers(4, 250, dtype=FLOAT), 30.0)]


# ---- Operations that write or read the cache.


def cache_cases(dtype: torch.dtype) -> Iterator[KernelCase]:
    for name, kv_dtype in KV_DTYPES[dtype].items():
        yield from stored_cases(name, dtype, kv_dtype)


def stored_cases(stored: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> Iterator[KernelCase]:
    """Yield the cases of a cache that stores numbers in `kv_dtype`."""

    def placed(kernels: NativeKernels) -> list[Tensor]:
        heads, kv_heads, dim = 6, 2, 32
        cache = KVCache(1, 6, 4, kv_heads, dim, kv_dtype, CPU)
        qkv = numbers(7, (heads + 2 * kv_heads) * dim, dtype=dtype)
        turns = randn(7, dim, dtype=dtype, seed=1), randn(7, dim, dtype=dtype, seed=2)
        q = kernels.place(qkv, turns, cache, 0, torch.tensor([4, 21, 6, 22, 5, 13, 23]))
        return [q, cache.k, cache.v]

    def attended(case: PagedCase, window: int | None = None, **options: Any) -> Compute:
        batch, cache, q = case.batch(), case.cache(), case.queries()

        def compute(kernels: NativeKernels) -> list[Tensor]:
            attention = NativePagedAttention(kernels, case.block_tokens)
            plans = [
                attention.plan(each, window)
                for each in (batch, batch.with_seen_ends(case.seen_ends(run=5)))
            ]
            return [attention.run(q, *cache.layer(0), plan, **options) for plan in plans]

        return compute

    def indexed(kernels: NativeKernels) -> list[Tensor]:
        heads, dim, size, visible = 9, 64, 16, [280, 281, 3, 40]
        (first, second), rows = scattered(24, 18, 3), torch.tensor([0, 0, 1, 1])
        cache = KVCache(1, 24, size, 1, dim, kv_dtype, CPU, is_latent=True)
        for number, blocks in enumerate((first, second)):
            row = PagedRow(0, size * len(blocks), blocks)
            keys = randn(row.count, 1, dim, dtype=dtype, seed=31 + number)
            cache.write(0, keys, None, attention_batch([row], size).slot_mapping)
        table = torch.tensor([first, second + [0] * (len(first) - len(second))])
        queries = randn(4, heads, dim, dtype=dtype, seed=33)
        weights = randn(4, heads, dtype=FLOAT, seed=34)
        keys = cache.layer(0)[0]
        return [kernels.index_scores(queries, weights, keys, table, rows, torch.tensor(visible))]

    of_cache: Any = {"dtype": dtype, "kv_dtype": kv_dtype}
    latents: Any = {"kv_heads": 1, "group": 18, "head_dim": 576, "is_latent": True}
    several = case_of((300, 1), (15, 1), (0, 1), (90, 9), **of_cache)
    alone = case_of((40, 1), (0, 7), group=1, head_dim=160, **of_cache)
    of_latents = case_of((40, 1), (20, 5), **latents, **of_cache)
    attentions = {
        "three queries": attended(several),
        "a window, a soft cap and sinks": attended(
            several, window=70, soft_cap=5.0, sinks=several.sinks()
        ),
        "one query of 160": attended(alone),
        "latents": attended(of_latents),
    }
    yield KernelCase(("place_kv",), f"six queries of 32{stored}", placed, dtype)
    for name, compute in attentions.items():
        yield KernelCase(("paged_attention",), f"{name}{stored}", compute, dtype)
    yield KernelCase(("index_scores",), f"nine heads of 64{stored}", indexed, dtype)


# ---- Recurrent layers.

MIXERS: dict[tuple[str, ...], list[RecurrentLayer]] = {
    ("gated_delta",): [
        delta_layer(2, 4, 12, 20, 4),
        delta_layer(1, 2, 33, 130, 4),
        delta_layer(3, 6, 12, 20, 4, tiled=True),
        delta_layer(2, 4, 12, 24, 4, beta_scale=2.0),
        delta_layer(2, 2, 33, 130, 3, by_row=True),
        delta_layer(2, 4, 128, 128, 4),
    ],
    ("mamba1_conv", "mamba1_scan"): [
        mamba1_layer(20, 16, 4),
        mamba1_layer(130, 33, 5),
        mamba1_layer(64, 128, 9, conv_bias=False),
    ],
    ("mamba2",): [
        mamba_layer(4, 20, 2, 12, 4),
        mamba_layer(3, 7, 3, 33, 3, conv_bias=False),
        mamba_layer(2, 64, 1, 128, 4, limits=(0.2, 0.9)),
        mamba_layer(4, 20, 2, 12, 4, norm=None),
        mamba_layer(4, 20, 2, 12, 4, norm="before gate"),
    ],
    ("rg_lru_conv", "rg_lru_scan"): [
        lru_layer(3, 20, 4, "silu"),
        lru_layer(2, 64, 4, "relu2"),
        lru_layer(2, 130, 3, "gelu"),
        lru_layer(5, 7, 9),
    ],
    ("short_conv",): [conv_layer(20, 3, bias=True), conv_layer(200, 9)],
}


def recurrent_cases() -> Iterator[KernelCase]:
    for functions, layers in MIXERS.items():
        for layer in layers:

            def stepped(kernels: NativeKernels, layer: RecurrentLayer = layer) -> list[Tensor]:
                requests = recurrent_requests(kernels, layer, 12, 20)
                requests.step(StepRow(0, 7, drafts=3, accepted=2, saves=(0, 2, 5)), StepRow(1, 1))
                requests.step(StepRow(1, 19), StepRow(0, 1))
                requests.step(StepRow(0, 5, saves=(4,)))
                return [*requests.results, requests.memory, *requests.saved.values()]

            yield KernelCase(functions, layer.name, stepped)


# ---- Sampling.


def sampled(kernels: NativeKernels) -> list[Tensor]:
    """Return the tokens that are drawn from a thousand, for each of some parameters and seeds."""
    each = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=40),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=2.0, min_p=0.05),
        SamplingParams(temperature=0.9, top_k=200, top_p=0.95, min_p=0.01),
        SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(temperature=1.0, presence_penalty=-0.7, logit_bias={7: 3.5, 900: -2.25}),
    ]
    requests = [
        RowRequest(params, tokens=[3, 7, 7, 250], prompt_tokens=2, seed=seed)
        for seed in range(16)
        for params in each
    ]
    slots, rows = bind_rows(requests)
    logits = randn(len(requests), 1000, dtype=FLOAT, seed=41, scale=2.5)
    choice = NativeSampling(kernels).choose(logits, slots, rows, changes=True)
    return [choice.tokens, choice.finite]
