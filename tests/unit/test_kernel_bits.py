"""Golden numbers of the kernels: results have the same bits on every instruction set, whatever
processor and compiler there is.

If a change of the kernels is meant to change bits, write the file anew and say so in the commit:

    python -m tests.unit.test_kernel_bits
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache, partial
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protocol.engine.sampling import SamplingParams
from tests.emulated import CSRC
from tests.support.checkpoints import VOCAB
from tests.support.kernel_cases import CPU, FLOAT, KV_DTYPES, KernelCase, function_cases
from tests.support.kernels import NAMES, native_kernels
from tests.support.paged import PagedRow, attention_batch, scattered
from tests.support.plans import GREEDY
from tests.support.random_decoder import (
    HIDDEN,
    ROLES,
    attention,
    mlp,
    model_spec,
    random_decoder,
)
from tests.unit.test_decode import first_step, plain_step, runner_of
from tests.unit.test_whole_step import BLOCK_TOKENS, PLAIN, SPECS, results
from worker.attention.select import select_attention
from worker.checkpoint.quant_blocks import BlockKind
from worker.device.cpuinfo import cpu_flags
from worker.kernels.library import runnable
from worker.kernels.native import NativeKernels
from worker.kv.cache import make_cache
from worker.models.decoder import DecoderModel
from worker.slots.states import StepStates
from worker.spec.kv_blocks import BlockLayers
from worker.spec.latent import LatentSpec
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.recurrent import GatedDeltaSpec, Mamba1Spec, Mamba2Spec, ShortConvSpec
from worker.spec.tensor_names import names_of

GOLDEN = Path(__file__).parents[1] / "data" / "kernel_bits.json"
SMALL = [kind for kind in BlockKind if kind.weights == 32]
"""Kinds of blocks that fit the narrow decoders."""
FACTORS = names_of(ROLES, stores_decay_factors=True)
"""Files with the factors of decays themselves: torch computes no exponential when it loads them."""
ROUTED = mlp(
    num_experts=6,
    top_k=2,
    router="sigmoid",
    choice_bias=True,
    num_groups=2,
    shared=64,
    scores_shared=False,
    expert_scale=2.5,
)
LATENT = LatentSpec(rank=64, rotated=32, plain=32, value_dim=32, query_rank=64)
OF_LATENTS = attention(num_heads=6, num_kv_heads=1, head_dim=96, rope=None, latent=LATENT)
DELTA: Any = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 24}
LAYERED = {
    "recurrent layers of four kinds, attention": model_spec(
        LayerSpec(recurrent=GatedDeltaSpec(**DELTA, kernel=4, eps=1e-6), mlp=mlp()),
        LayerSpec(
            recurrent=Mamba2Spec(
                num_heads=4, head_dim=24, num_groups=2, state=16, kernel=4, eps=1e-5
            ),
            mlp=ROUTED,
        ),
        LayerSpec(attention=attention(rope=None), mlp=mlp()),
        LayerSpec(
            recurrent=Mamba1Spec(channels=96, state=16, rank=32, kernel=4, eps=1e-5, norms=None),
            mlp=mlp(),
        ),
        LayerSpec(recurrent=ShortConvSpec(width=HIDDEN, kernel=3), mlp=mlp()),
    ),
    "latents, experts": model_spec(
        LayerSpec(attention=OF_LATENTS, mlp=mlp()), LayerSpec(attention=OF_LATENTS, mlp=ROUTED)
    ),
}
"""Models whose layers are calls of their own."""
EXACT = {
    *("add", "add_", "cat", "copy_", "div", "empty", "empty_like", "gather", "index", "index_add_"),
    *("index_copy_", "index_select", "masked_fill", "mul", "new_empty", "sum of 2", "topk"),
    *("zeros", "zeros_like"),
}
"""Torch operations that move numbers, or round a result of two numbers once. `index_add_` adds one
row to another."""
WITHOUT = {
    "kernels_version": "a number",
    "source_digest": "a digest",
    "bits_of_set": "says which cases a set promises",
    "set_runtime": "sets an address",
    "time_parts": "measures times",
    "packed_bytes": "a size",
    "pack_blocks": "makes what linear_to_float and gather_rows read, in the order of the set",
    "pack_dense": "likewise",
}
"""Functions without golden results of their own, and the reason."""


def layered_results(model: DecoderModel) -> list[Tensor]:
    """Return the logits of two steps, the keys and values, and the recurrent states."""
    spec, blocks = model.spec, scattered(16, 4, 4, 4)
    cache = make_cache(BlockLayers.of(spec), 16, BLOCK_TOKENS, FLOAT, CPU)
    attend = select_attention(BLOCK_TOKENS, dtype=FLOAT, kernels=model.kernels)
    memory, none, found = torch.zeros(3, spec.state_items), np.empty(0, np.int64), []
    for step in ([(2, 0, 1), (0, 0, 9), (1, 0, 5)], [(0, 9, 1), (2, 1, 1), (1, 5, 8)]):
        rows = [PagedRow(start, count, blocks[slot]) for slot, start, count in step]
        slots, starts, counts = (np.array(column) for column in zip(*step, strict=True))
        of_rows = slots, starts, counts.cumsum() - counts, counts, counts
        states = StepStates(memory, memory[:1], *of_rows, none, none, none)
        tokens = torch.arange(int(counts.sum())) * 7 % spec.vocab_size
        batch = attention_batch(rows, BLOCK_TOKENS)
        found.append(model.logits(model(tokens, batch, cache, attend, None, states)))
    return [*found, cache.rows, memory]


def decoded(kernels: NativeKernels, dtype: torch.dtype) -> list[Tensor]:
    """Return the tokens of four decode steps in one call each, and the keys and values."""
    spec = model_spec(PLAIN, PLAIN, vocab_size=VOCAB)
    model = random_decoder(spec, kernels, dtype, BlockKind.Q4_1)
    runner = runner_of(model, dtype, in_pieces=False)
    drawn = [SamplingParams(temperature=0.9, top_p=0.9), SamplingParams(temperature=1.1)]
    runner.step(first_step([GREEDY, *drawn]))
    for step in range(1, 5):
        runner.step(plain_step(step, [2, 0, 1]))
    parts = runner.components
    return [parts.slots["token_ids"], parts.slots["len"], parts.cache.rows]


def step_cases(dtype: torch.dtype) -> Iterator[KernelCase]:
    """Yield the cases of whole steps in one call."""
    stored = cycle(KV_DTYPES[dtype].values())
    for (name, spec), kind, kv_dtype in zip(SPECS.items(), cycle(SMALL), stored, strict=False):

        def stepped(
            kernels: NativeKernels,
            spec: ModelSpec = spec,
            kind: BlockKind = kind,
            kv_dtype: torch.dtype = kv_dtype,
        ) -> list[Tensor]:
            model = random_decoder(spec, kernels, dtype, kind)
            assert model.whole is not None
            return results(model, dtype, kv_dtype)

        yield KernelCase(("forward", "logits"), name, stepped, dtype)
    yield KernelCase(("decode",), "rows that draw", partial(decoded, dtype=dtype), dtype)


def layered_cases() -> Iterator[KernelCase]:
    """Yield the cases of steps whose layers are calls of their own."""
    for name, spec in LAYERED.items():

        def stepped(kernels: NativeKernels, spec: ModelSpec = spec) -> list[Tensor]:
            model = random_decoder(spec, kernels, FLOAT, BlockKind.Q8_0, names=FACTORS)
            assert model.whole is None
            return layered_results(model)

        yield KernelCase((), name, stepped)


@cache
def cases() -> tuple[KernelCase, ...]:
    of_steps = (each for dtype in KV_DTYPES for each in step_cases(dtype))
    return (*function_cases(), *of_steps, *layered_cases())


class RecordedLibrary:
    """A compiled library that records which of its functions are used."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.used: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.used.add(name)
        return getattr(self._library, name)


def digest(found: Iterable[Tensor]) -> str:
    """Return the digest of the bits of some tensors."""
    raw = b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in found)
    return sha256(raw).hexdigest()[:16]


def digests(kernels: NativeKernels) -> dict[str, str]:
    """Return key -> digest of each case whose bits these kernels promise, and check that its
    functions take part."""
    recorded: Any = RecordedLibrary(kernels.library)
    kernels.library = recorded
    found = {}
    for case in cases():
        if case.is_promised(kernels):
            recorded.used.clear()
            found[case.key] = digest(case.compute(kernels))
            assert recorded.used >= set(case.functions), case.key
    return found


@pytest.mark.parametrize("name", NAMES)
def test_results_are_the_golden_ones(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    found = digests(native_kernels(name))
    assert found == {key: golden.get(key) for key in found}
    promised = {case.key for case in cases() if case.dtype is FLOAT and case.rounds_inputs}
    assert promised <= found.keys()


def test_the_golden_results_are_those_of_the_cases_and_all_differ() -> None:
    """Digests of results that are all alike, such as NaN, would prove nothing."""
    golden = json.loads(GOLDEN.read_text())
    assert [*golden] == [case.key for case in cases()]
    assert len(set(golden.values())) == len(golden)


def test_every_exported_function_has_golden_results_or_a_reason() -> None:
    source = (CSRC / "kernels.cpp").read_text()
    exported = re.findall(r"^EXPORT [^(]*?(\w+)\(", source, re.MULTILINE)
    assert len(exported) == source.count("\nEXPORT ")
    with_results = {name for case in cases() for name in case.functions}
    assert not with_results & WITHOUT.keys()
    assert set(exported) == with_results | WITHOUT.keys()


class FloatOperations(TorchDispatchMode):
    """Collects the names of the torch operations that make or change tensors of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        if not func.is_view and any(each.is_floating_point() for each in made):
            name = func.overloadpacket.__name__
            terms = f" of {args[0].numel() // max(found.numel(), 1)}" if name == "sum" else ""
            self.names.add(name + terms)
        return found


@pytest.mark.parametrize("case", [*layered_cases()], ids=lambda case: case.name)
def test_operations_of_torch_between_the_layers_have_one_result(case: KernelCase) -> None:
    """So the golden results do not depend on torch's version and instruction set."""
    with FloatOperations() as operations:
        case.compute(native_kernels())
    assert {"add"} <= operations.names <= EXACT


if __name__ == "__main__":
    loaded = [native_kernels(each.name) for each in runnable(cpu_flags())]
    promising = next(each for each in loaded if all(case.is_promised(each) for case in cases()))
    GOLDEN.write_text(json.dumps(digests(promising), indent=2) + "\n")
