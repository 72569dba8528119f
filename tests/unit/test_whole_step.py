"""The compiled step gives the results of the eager decoder for every option of a spec."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels import NAMES, assert_near, native_kernels
from tests.support.paged import PagedRow, attention_batch, scattered
from tests.support.random_decoder import (
    HEAD_DIM,
    HIDDEN,
    ROLES,
    attention,
    mlp,
    model_spec,
    random_decoder,
)
from worker.attention.select import select_attention
from worker.checkpoint.quant_blocks import BlockKind
from worker.kernels.reference import TorchKernels
from worker.kv.cache import KVCache
from worker.kv.transfer.shared_memory import SharedMemory
from worker.models.compiled import why_not
from worker.models.decoder import DecoderModel
from worker.models.whole_step import PassMemory
from worker.spec.model_spec import LayerSpec, ModelSpec, NormSpec, Xielu
from worker.spec.recurrent import ShortConvSpec
from worker.spec.rope_config import LinearScaling, RopeConfig
from worker.spec.step_limits import STEP_TOKENS, StepLimits
from worker.spec.tensor_names import names_of
from worker.spec.tensors import ModelTensors
from worker.startup.memory_plan import PROCESS_BYTES, PlannedModel, weights_bytes, work_bytes

BLOCK_TOKENS = 4
LAYER_NORM = NormSpec(kind="layer", eps=1e-5, bias=True)
HALF_TURNED = RopeConfig(HEAD_DIM // 4, 1e4)
PLAIN = LayerSpec(attention=attention(), mlp=mlp())
CLAMPED = {"activation": "clamped_swiglu", "alpha": 1.7, "limit": 0.8}
UNGATED = mlp(is_gated=False, activation="gelu", bias=True)
XIELU = mlp(is_gated=False, activation="xielu", xielu=Xielu(1.3, 0.9, 0.5, -1e-2))

SPECS = {
    "norms before blocks": model_spec(PLAIN, residual_scale=0.4, logits_scale=0.3),
    "norms after blocks": model_spec(
        LayerSpec(attention=attention(qk_norm="projection"), mlp=mlp(), order="post"),
        LayerSpec(
            attention=attention(rope=None, qk_norm="head", sinks=True), mlp=mlp(), order="post"
        ),
        residual_scale=0.4,
    ),
    "norms around blocks": model_spec(
        LayerSpec(
            attention=attention(qk_norm="head", soft_cap=2.0, window=5),
            mlp=mlp(activation="gelu_tanh"),
            order="both",
        ),
        LayerSpec(
            attention=attention(rope=RopeConfig(HEAD_DIM, 1e6, LinearScaling(4.0))),
            mlp=mlp(activation="gelu"),
            order="both",
        ),
        norm=NormSpec(eps=1e-5, offset=1.0),
        embedding_scale=HIDDEN**0.5,
        logits_soft_cap=1.5,
    ),
    "layer norms": model_spec(
        LayerSpec(attention=attention(rope=None, qkv_bias=True, output_bias=True), mlp=UNGATED),
        LayerSpec(attention=attention(rope=None), mlp=UNGATED),
        norm=LAYER_NORM,
        learned_positions=64,
    ),
    "layer norms with an offset": model_spec(
        PLAIN, norm=NormSpec(kind="layer", eps=1e-5, offset=1.0)
    ),
    "parallel, two norms": model_spec(
        LayerSpec(attention=attention(rope=HALF_TURNED), mlp=UNGATED, order="parallel"),
        LayerSpec(attention=attention(rope=HALF_TURNED), mlp=mlp(), order="parallel"),
        norm=LAYER_NORM,
        residual_scale=0.7,
    ),
    "parallel, one norm": model_spec(
        LayerSpec(attention=attention(), mlp=mlp(), order="parallel_one_norm"),
        LayerSpec(attention=attention(rope=None), mlp=mlp(), order="parallel_one_norm"),
        norm=NormSpec(kind="layer", eps=1e-5),
    ),
    "experts": model_spec(
        LayerSpec(attention=attention(), mlp=mlp(num_experts=5, top_k=2)),
        LayerSpec(
            attention=attention(),
            mlp=mlp(num_experts=40, top_k=3, renormalize=False, bias=True, **CLAMPED),
        ),
        LayerSpec(attention=attention(), mlp=mlp(intermediate=320)),
        residual_scale=0.7,
    ),
    "mixed": model_spec(
        LayerSpec(attention=attention(), mlp=mlp(is_gated=False, activation="silu")),
        LayerSpec(attention=attention(), mlp=XIELU),
        LayerSpec(attention=attention(window=3), mlp=mlp(), order="both"),
        LayerSpec(attention=attention(rope=HALF_TURNED), mlp=mlp(), order="parallel"),
    ),
}


def results(
    model: DecoderModel, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the logits of two steps, which mix rows of one token and chunks, and the K/V cache."""
    spec, blocks = model.spec, scattered(16, 4, 4, 4)
    shape = (spec.num_layers, 16, BLOCK_TOKENS, spec.layer_heads[0].count, spec.layer_heads[0].dim)
    cache = KVCache(*shape, kv_dtype or dtype, torch.device("cpu"))
    attend = select_attention(BLOCK_TOKENS, dtype=dtype, kernels=model.kernels)
    steps = [
        [PagedRow(0, 1, blocks[2]), PagedRow(0, 9, blocks[0]), PagedRow(0, 5, blocks[1])],
        [PagedRow(9, 1, blocks[0]), PagedRow(1, 1, blocks[2]), PagedRow(5, 8, blocks[1])],
    ]
    found = []
    for rows in steps:
        tokens = torch.arange(sum(row.count for row in rows)) * 7 % spec.vocab_size
        hidden = model(tokens, attention_batch(rows, BLOCK_TOKENS), cache, attend)
        found.append(model.logits(hidden))
    return [*found, cache.k.float(), cache.v.float()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_compiled_step_equals_the_eager_one(name: str, spec: ModelSpec) -> None:
    """In bfloat16, every layer rounds. There the error of the compiled step may be hardly larger
    than that of the eager decoder."""
    native, exact = native_kernels(name), torch.float32
    truth = results(random_decoder(spec, TorchKernels(), exact), exact)
    compiled = random_decoder(spec, native, exact)
    assert compiled.whole is not None
    for one, other in zip(results(compiled, exact), truth, strict=True):
        assert_near(one, other)
    rounded = torch.bfloat16
    ours = results(random_decoder(spec, native, rounded), rounded)
    theirs = results(random_decoder(spec, TorchKernels(), rounded), rounded)
    for one, other, right in zip(ours, theirs, truth, strict=True):
        assert (one - right).std() < 1.1 * (other - right).std()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_compiled_step_rounds_the_inputs_that_the_eager_one_rounds(
    name: str, spec: ModelSpec
) -> None:
    """The two differ only in the few numbers that lie so close to the middle between two integers
    that they are rounded to the other one. Without rounding, all results differ more."""
    native, dtype = native_kernels(name), torch.float32
    compiled, eager, exact = (random_decoder(spec, native, dtype, BlockKind.Q4_1) for _ in range(3))
    eager.whole = exact.whole = None
    for owner, attribute in [(exact.weights, "head"), *all_linears(exact)]:
        getattr(owner, attribute).matrix.struct.rounds_inputs = 0
    found = (results(model, dtype) for model in (compiled, eager, exact))
    for one, other, unrounded in zip(*found, strict=True):
        assert (one - other).std() < 0.5 * (unrounded - other).std()


def all_linears(model: DecoderModel) -> list[tuple[Any, str]]:
    return [each for layer in model.weights.layers for each in layer.linears]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_alone_and_beside_rows_of_other_experts(name: str) -> None:
    dtype = torch.bfloat16
    model = random_decoder(SPECS["experts"], native_kernels(name), dtype)
    attend = select_attention(BLOCK_TOKENS, dtype=dtype, kernels=model.kernels)
    rows = [PagedRow(0, 1, [block]) for block in range(9)]

    def hidden(first: int, end: int) -> Tensor:
        cache = KVCache(3, 9, BLOCK_TOKENS, 2, HEAD_DIM, dtype, torch.device("cpu"))
        batch = attention_batch(rows[first:end], BLOCK_TOKENS)
        return model(torch.arange(first, end) * 7, batch, cache, attend)

    together = hidden(0, 9)
    assert torch.equal(together, torch.cat([hidden(i, i + 1) for i in range(9)]))
    assert torch.equal(together[4:], hidden(4, 9))


def test_a_cache_of_another_size_at_the_same_address_is_a_new_one() -> None:
    """The allocator gives the memory of a deleted cache to the next one, whose layers lie
    elsewhere."""
    native, dtype, cpu = native_kernels(), torch.float32, torch.device("cpu")
    model = random_decoder(SPECS["experts"], native, dtype)
    attend = select_attention(BLOCK_TOKENS, dtype=dtype, kernels=native)
    sizes = (BLOCK_TOKENS, 2, HEAD_DIM, dtype, cpu)
    memory = SharedMemory(2 * 3 * 8 * BLOCK_TOKENS * 2 * HEAD_DIM * dtype.itemsize)

    def keys_and_values(cache: KVCache) -> Tensor:
        batch = attention_batch([PagedRow(0, 3, [2])], BLOCK_TOKENS)
        model(torch.tensor([1, 2, 3]), batch, cache, attend)
        return torch.stack([cache.k[:, 2], cache.v[:, 2]])

    small = KVCache(3, 4, *sizes, memory)
    expected = keys_and_values(small)
    start = small.k.data_ptr()
    del small
    large = KVCache(3, 8, *sizes, memory)
    assert large.k.data_ptr() == start
    large.rows.zero_()
    assert torch.equal(keys_and_values(large), expected)


def test_positions_beyond_the_learned_ones_are_refused() -> None:
    model = random_decoder(SPECS["layer norms"], native_kernels(), torch.float32)
    cache = KVCache(2, 20, BLOCK_TOKENS, 2, HEAD_DIM, torch.float32, torch.device("cpu"))
    attend = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=model.kernels)
    batch = attention_batch([PagedRow(63, 2, list(range(17)))], BLOCK_TOKENS)
    with pytest.raises(ValueError, match="exceeds the 64 learned"):
        model(torch.tensor([1, 2]), batch, cache, attend)


def test_a_step_that_one_call_cannot_compute_is_refused_in_words() -> None:
    assert why_not(model_spec(PLAIN, head_bias=True)) == "its output head has a bias"
    other = LayerSpec(attention=attention(num_heads=4), mlp=mlp())
    assert why_not(model_spec(PLAIN, other)) == "its layers have different sizes"
    conv = LayerSpec(recurrent=ShortConvSpec(width=8, kernel=3), mlp=mlp())
    assert why_not(model_spec(PLAIN, conv)) == "it has recurrent layers"


@pytest.mark.parametrize(
    "changes", [{"router": "sigmoid"}, {"choice_bias": True}, {"expert_scale": 2.0}], ids=str
)
def test_a_router_that_is_no_plain_softmax_is_refused_in_words(changes: dict[str, Any]) -> None:
    experts = mlp(num_experts=4, top_k=2, **changes)
    layer = LayerSpec(attention=attention(), mlp=experts)
    assert why_not(model_spec(PLAIN, layer)) == "its routers compute more than a softmax"
    plain = LayerSpec(attention=attention(), mlp=mlp(**changes))
    assert why_not(model_spec(PLAIN, plain)) == ""


class MeasuredMemory(PassMemory):
    """Scratch memory that adds up the sizes that were requested of it."""

    num_bytes = 0

    def take(self, sizes: Sequence[int]) -> list[int]:
        self.num_bytes += sum(sizes)
        return super().take(sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_memory_plan_covers_a_mixture_of_experts(dtype: torch.dtype) -> None:
    spec = SPECS["experts"]
    model = random_decoder(spec, native_kernels(), dtype)
    assert model.whole is not None
    planned = PlannedModel(
        "m", ModelTensors(spec, names_of(ROLES)), defaultdict(lambda: "BF16"), is_packed=True
    )
    name = str(dtype).removeprefix("torch.")
    unique = {tensor.data_ptr(): tensor.nbytes for tensor in model.tensors()}
    assert weights_bytes(planned, name) == sum(unique.values())
    shape = (spec.num_layers, 2, BLOCK_TOKENS, spec.layer_heads[0].count, spec.layer_heads[0].dim)
    memory = MeasuredMemory()
    model.whole.forward(STEP_TOKENS, KVCache(*shape, dtype, torch.device("cpu")), memory)
    limits = StepLimits(0, STEP_TOKENS, max_drafts=0, planned_tokens=STEP_TOKENS)
    assert memory.num_bytes <= work_bytes([planned], name, limits) - PROCESS_BYTES
