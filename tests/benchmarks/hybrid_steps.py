"""Measures steps of a hybrid: what its recurrent layers cost beside its matrices.

    python -m tests.benchmarks.hybrid_steps granite-tiny
    python -m tests.benchmarks.hybrid_steps lfm2 --recurrence torch --weights BF16

The model has random weights and the shape of a published one, but only some of its layers, in about
the same mixture. Its inputs are rounded to eight bits, as with `--activations int8`. Prints the CPU
time of a forward pass without the output head, in milliseconds, and the share of each part: medians
over the steps.

recurrence   the convolution, the state, and all else that one call of the kernels computes
matrices     all linears, those of experts too
attention    of the layers that have it
kernels      other calls of the compiled kernels: norms and activations
rest         operations of torch, and Python
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.support.kernels import native_kernels
from tests.support.paged import PagedRow, attention_batch
from tests.support.random_decoder import model_spec, random_decoder
from worker.attention.select import select_attention
from worker.benchmark.parts import PartsClock, TimedPart
from worker.checkpoint.quant_blocks import BlockKind
from worker.kernels.native import NativeKernels
from worker.kernels.reference import TorchKernels
from worker.kv.cache import KVCache
from worker.slots.states import StepStates
from worker.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from worker.spec.recurrent import (
    GatedDeltaSpec,
    Mamba2Spec,
    RecurrentSpec,
    RgLruSpec,
    ShortConvSpec,
)
from worker.spec.rope_config import RopeConfig

STEPS = ((1, 1), (8, 1), (32, 1), (1, 512))
"""Rows of a step, and tokens of each."""
CONTEXT, BLOCK_TOKENS = 128, 16
RECURRENCES = ("gated_delta", "mamba2", "rg_lru_conv", "rg_lru_scan", "short_conv")
PARTS = ("recurrence", "matrices", "attention", "kernels", "rest")


def hybrid(
    recurrent: RecurrentSpec,
    mlp: MlpSpec,
    *,
    hidden: int,
    heads: tuple[int, int, int],
    num_recurrent: int,
    **attention: Any,
) -> ModelSpec:
    """Return `num_recurrent` recurrent layers and one with attention, with `heads` query heads,
    key/value heads and dimension."""
    num_heads, num_kv_heads, dim = heads
    attends = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        rope=RopeConfig(dim, 1e6),
        scale=dim**-0.5,
        **attention,
    )
    return model_spec(
        *[LayerSpec(recurrent=recurrent, mlp=mlp)] * num_recurrent,
        LayerSpec(attention=attends, mlp=mlp),
        hidden=hidden,
        vocab_size=256,
        context_tokens=4096,
    )


def granite(hidden: int, heads: tuple[int, int, int], mlp: MlpSpec) -> ModelSpec:
    """Return a shape of Granite 4 H. The Mamba heads are twice as wide as the hidden states."""
    mamba = Mamba2Spec(
        num_heads=hidden // 32, head_dim=64, num_groups=1, state=128, kernel=4, eps=1e-5
    )
    return hybrid(mamba, mlp, hidden=hidden, heads=heads, num_recurrent=4)


def qwen(
    hidden: int, heads: tuple[int, int, int], *, value_heads: int, intermediate: int
) -> ModelSpec:
    delta = GatedDeltaSpec(
        num_key_heads=16,
        num_value_heads=value_heads,
        key_dim=128,
        value_dim=128,
        kernel=4,
        eps=1e-6,
    )
    return hybrid(
        delta,
        MlpSpec(intermediate=intermediate),
        hidden=hidden,
        heads=heads,
        num_recurrent=3,
        qk_norm="head",
        gated=True,
    )


def experts(intermediate: int, num_experts: int, top_k: int, shared: int) -> MlpSpec:
    return MlpSpec(
        intermediate=intermediate,
        num_experts=num_experts,
        top_k=top_k,
        shared=shared,
        scores_shared=False,
    )


MODELS: dict[str, Callable[[], ModelSpec]] = {
    "granite-tiny": lambda: granite(1536, (12, 4, 128), experts(512, 64, 6, 1024)),
    "granite-micro": lambda: granite(2048, (32, 8, 64), MlpSpec(intermediate=8192)),
    "lfm2": lambda: hybrid(
        ShortConvSpec(width=2048, kernel=3),
        MlpSpec(intermediate=8192),
        hidden=2048,
        heads=(32, 8, 64),
        num_recurrent=2,
        qk_norm="head",
    ),
    "recurrentgemma-2b": lambda: hybrid(
        RgLruSpec(num_heads=10, head_dim=256, kernel=4, activation="gelu_tanh"),
        MlpSpec(intermediate=7680, activation="gelu_tanh", bias=True),
        hidden=2560,
        heads=(10, 1, 256),
        num_recurrent=2,
        window=2048,
        output_bias=True,
    ),
    "qwen3.5": lambda: qwen(2048, (8, 2, 256), value_heads=32, intermediate=6144),
    "qwen3.6-27b": lambda: qwen(5120, (24, 4, 256), value_heads=48, intermediate=17408),
}
"""Shapes of Granite 4 H Tiny and Micro, LFM2 1.2B, RecurrentGemma 2B, a Qwen3.5 of two billion
weights, and Qwen3.6 27B."""


class WatchedKernels:
    """Kernels whose calls are timed: those of the recurrence, which those in `recurrence` compute,
    and the others."""

    def __init__(self, kernels: NativeKernels, recurrence: Any, clock: PartsClock) -> None:
        self._timed = TimedPart(kernels, clock, "kernels")
        self._attention = TimedPart(kernels, clock, "attention")
        self._recurrence = TimedPart(recurrence, clock, "recurrence")

    def __getattr__(self, name: str) -> Any:
        if name in RECURRENCES:
            return getattr(self._recurrence, name)
        return getattr(self._attention if name == "place" else self._timed, name)


class HybridSteps:
    """Steps of `rows` rows of `tokens` tokens each after CONTEXT others."""

    def __init__(self, spec: ModelSpec, model: Any, attention: Any, rows: int, tokens: int) -> None:
        self._model, self._attention = model, attention
        blocks = -(-(CONTEXT + tokens) // BLOCK_TOKENS)
        tables = np.arange(1, 1 + rows * blocks).reshape(rows, blocks).tolist()
        self._cache = KVCache(
            spec.num_kv_layers,
            1 + rows * blocks,
            BLOCK_TOKENS,
            spec.layer_heads[0].count,
            spec.layer_heads[0].dim,
            torch.bfloat16,
            torch.device("cpu"),
        )
        self._batch = attention_batch(
            [PagedRow(CONTEXT, tokens, table) for table in tables], BLOCK_TOKENS
        )
        self._ids = torch.arange(rows * tokens) % spec.vocab_size
        counts, none = np.full(rows, tokens), np.empty(0, np.int64)
        memory = torch.full((rows, spec.state_items), 0.01)
        starts, firsts = np.full(rows, CONTEXT), counts.cumsum() - counts
        of_rows, saves = (np.arange(rows), starts, firsts, counts, counts), (none, none, none)
        self._states = StepStates(memory, memory[:1], *of_rows, *saves)

    def run(self) -> None:
        self._model(self._ids, self._batch, self._cache, self._attention, None, self._states)


def watch(model: Any, clock: PartsClock) -> None:
    """Time the linears of a model."""
    owners = [linear for layer in model.weights.layers for linear in layer.linears]
    for layer in model.weights.layers:
        more = ((layer.mixer, "gates"), (layer.mlp, "router"))
        owners += [(owner, name) for owner, name in more if hasattr(owner, name)]
    for owner, name in owners:
        setattr(owner, name, TimedPart(getattr(owner, name), clock, "matrices"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--kernels", help="instruction set; by default the best one")
    parser.add_argument("--weights", default="Q8_0", help="Q8_0, Q4_K, ... or BF16")
    parser.add_argument("--recurrence", choices=("compiled", "torch"), default="compiled")
    parser.add_argument("--seconds", type=float, default=8.0, help="time for each kind of step")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels, clock = native_kernels(options.kernels), PartsClock(time.process_time)
    spec = MODELS[options.model]()
    kind = None if options.weights == "BF16" else BlockKind[options.weights]
    model: Any = random_decoder(spec, kernels, torch.bfloat16, kind)
    watch(model, clock)
    by = kernels if options.recurrence == "compiled" else TorchKernels()
    attention: Any = select_attention(BLOCK_TOKENS, dtype=torch.bfloat16, kernels=kernels)
    attention = TimedPart(attention, clock, "attention")
    model.kernels = WatchedKernels(kernels, by, clock)
    print(f"{options.model}, {kernels.name}, {options.weights}, recurrence {options.recurrence}")
    for rows, tokens in STEPS:
        steps = HybridSteps(spec, model, attention, rows, tokens)
        print(f"{rows:3} x {tokens:3}: {measured(steps, clock, options.seconds)}", flush=True)


def measured(steps: HybridSteps, clock: PartsClock, seconds: float) -> str:
    """Return the median CPU time of a step in milliseconds, and the share of each part."""
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found["rest"]) < 4:
        clock.seconds.clear()
        with clock.part("rest"):
            steps.run()
        for part, times in found.items():
            times.append(clock.seconds.get(part, 0.0))
    medians = {part: statistics.median(times[1:]) for part, times in found.items()}
    total = sum(medians.values())
    shares = "  ".join(f"{part} {time / total:6.1%}" for part, time in medians.items())
    return f"{total * 1e3:8.2f} ms  {shares}"


if __name__ == "__main__":
    main()
