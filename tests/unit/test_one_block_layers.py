"""Layers that have only a token mixer or only an MLP."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.paged import PagedRow, attention_batch
from tests.support.random_decoder import (
    HIDDEN,
    ROLES,
    RandomTensors,
    attention,
    mlp,
    model_spec,
)
from worker.attention.select import select_attention
from worker.errors import UnusableModel
from worker.kv.cache import make_cache
from worker.loading.weights import load_weights
from worker.models.compiled import why_not
from worker.models.decoder import DecoderModel
from worker.spec.kv_blocks import BlockLayers
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.recurrent import ShortConvSpec
from worker.spec.share import divided
from worker.spec.tensor_names import names_of
from worker.spec.tensors import ModelTensors

CPU, BLOCK_TOKENS = torch.device("cpu"), 4
BOTH = LayerSpec(attention=attention(), mlp=mlp())
SPLIT = LayerSpec(attention=attention()), LayerSpec(mlp=mlp())
CONV = ShortConvSpec(width=HIDDEN, kernel=3)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (LayerSpec(), "neither a token mixer nor an MLP"),
        (LayerSpec(attention=attention(), recurrent=CONV, order="post"), "two token mixers"),
        (LayerSpec(mlp=mlp(), order="parallel"), "norms or experts for two"),
        (LayerSpec(attention=attention(), order="both"), "norms or experts for two"),
        (LayerSpec(attention=attention(), beside=mlp()), "norms or experts for two"),
    ],
)
def test_blocks_that_contradict_each_other_are_refused(layer: LayerSpec, reason: str) -> None:
    with pytest.raises(UnusableModel, match=reason):
        model_spec(BOTH, layer)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_groups": 3}, "1 of 3 groups of 8 experts"),
        ({"num_groups": 4, "top_groups": 5}, "5 of 4 groups of 8 experts"),
        ({"num_groups": 8}, "groups of one expert"),
        ({"num_groups": 4, "top_k": 3}, "3 of 8 experts"),
        ({"top_k": 9}, "9 of 8 experts"),
    ],
)
def test_experts_that_cannot_be_chosen_are_refused(changes: dict[str, int], reason: str) -> None:
    with pytest.raises(UnusableModel, match=reason):
        model_spec(LayerSpec(attention=attention(), mlp=mlp(num_experts=8, **changes)))


class OfLayerZero(RandomTensors):
    """A source in which layer 1 has the tensors of layer 0."""

    def read_into(self, name: str, target: Tensor, index: int | None = None) -> None:
        RandomTensors.read_into(self, name.replace("layers.1.", "layers.0."), target, index)


def hidden_states(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Tensor:
    tensors = ModelTensors(spec, names_of(ROLES))
    weights = load_weights(tensors, OfLayerZero(), dtype=dtype, device=CPU)
    model = DecoderModel(spec, weights)
    batch = attention_batch([PagedRow(0, 19, range(1, 6))], BLOCK_TOKENS)
    cache = make_cache(BlockLayers.of(spec), 6, BLOCK_TOKENS, dtype, CPU)
    attend = select_attention(BLOCK_TOKENS, dtype=dtype)
    return model(torch.arange(1, 20), batch, cache, attend)


def test_two_layers_with_one_block_compute_what_one_layer_with_both_computes() -> None:
    assert torch.equal(hidden_states(model_spec(*SPLIT)), hidden_states(model_spec(BOTH)))


def test_layers_with_one_block_need_neither_the_tensors_nor_the_norm_of_the_other() -> None:
    whole, parts = (ModelTensors(model_spec(*each), names_of(ROLES)) for each in ([BOTH], SPLIT))
    renamed = [(name.replace("layers.1.", "layers.0."), shape) for name, shape in parts.tensors()]
    assert sorted(renamed) == sorted(whole.tensors())


def test_layers_with_one_block_are_computed_by_operation() -> None:
    assert why_not(model_spec(BOTH)) == ""
    assert why_not(model_spec(*SPLIT)) == "some of its layers have only attention or only an MLP"


def test_layers_with_one_block_are_not_divided_among_ranks() -> None:
    with pytest.raises(UnusableModel, match="only attention or only an MLP"):
        divided(model_spec(*SPLIT), 2)


def test_the_sum_of_the_results_may_be_float32_although_the_weights_are_not() -> None:
    """It is then nearer to what weights in float32 give, which are the same numbers: results that
    are small beside the sum are not lost in it."""

    def states(dtype: torch.dtype, **options: bool) -> Tensor:
        return hidden_states(model_spec(*SPLIT * 4, residual_scale=0.01, **options), dtype)

    right, plain = states(torch.float32), states(torch.bfloat16)
    precise = states(torch.bfloat16, float_residual=True)
    assert (plain.dtype, precise.dtype) == (torch.bfloat16, torch.float32)
    assert (precise - right).norm() < 0.5 * (plain - right).norm()
