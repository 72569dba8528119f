"""Configs of Gemma 3n, and the parts that only it has: streams, branches and sparse MLPs."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest
import torch

from worker.errors import UnusableModel
from worker.layers.mlp import keep_largest
from worker.models.compiled import why_not
from worker.spec.families.registry import find_family
from worker.spec.model_spec import ModelSpec
from worker.spec.share import divided

E2B: dict[str, Any] = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    "altup_coef_clip": 120.0,
    "altup_lr_multiplier": 1.0,
    "intermediate_size": [8192] * 30,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
    "num_hidden_layers": 30,
    "num_kv_shared_layers": 10,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
}
"""As published, without keys whose values are the defaults."""


def spec_of(**changes: Any) -> ModelSpec:
    config = E2B | changes
    return find_family(config).spec(config)


def test_a_published_config_is_read() -> None:
    spec = spec_of()
    first, last = spec.layers[0], spec.layers[-1]
    assert first.attention is not None
    assert last.attention is not None
    assert first.mlp is not None
    assert last.mlp is not None
    assert (first.attention.window, last.attention.window) == (512, None)
    assert (first.attention.kv_of, last.attention.kv_of) == (None, 19)
    assert first.attention.rope is not None
    assert last.attention.rope is not None
    assert (first.attention.rope.theta, last.attention.rope.theta) == (1e4, 1e6)
    assert (first.mlp.intermediate, last.mlp.gate_cutoff) == (8192, None)
    assert first.mlp.gate_cutoff == pytest.approx(1.6448536)
    assert (first.laurel, spec.num_kv_layers) == (64, 20)
    assert spec.altup is not None
    assert (spec.altup.streams, spec.altup.active) == (4, 0)


def test_the_first_ten_layers_are_sparse_by_default() -> None:
    for layers, sparse in ((30, 10), (10, 0)):
        spec = spec_of(
            num_hidden_layers=layers,
            layer_types=None,
            intermediate_size=64,
            activation_sparsity_pattern=None,
            num_kv_shared_layers=0,
        )
        assert [each.gate_cutoff is not None for each in spec.mlps].count(True) == sparse


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"intermediate_size": [64] * 29}, "intermediate_size must be a list of 30 layers"),
        ({"intermediate_size": [64] * 29 + ["x"]}, "intermediate_size: '29' is 'x'"),
        ({"activation_sparsity_pattern": 0.5}, "activation_sparsity_pattern must be a list of 30"),
        ({"activation_sparsity_pattern": [1.0] * 30}, "within 0..1"),
        ({"activation_sparsity_pattern": [-0.5] * 30}, "within 0..1"),
        ({"num_kv_shared_layers": 30}, "no layer of type sliding_attention"),
        ({"altup_num_inputs": 1}, "1 streams"),
        ({"altup_num_inputs": 65}, "65 streams"),
        ({"altup_active_idx": 4}, "stream 4 of 4"),
        ({"altup_active_idx": -1}, "stream -1 of 4"),
        ({"laurel_rank": 0}, "a dimension of the model"),
        ({"hidden_size_per_layer_input": 0}, "without per-layer inputs"),
        ({"laurel_rank": None}, "'laurel_rank' is null"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
    ids=str,
)
def test_a_config_that_is_not_supported_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableModel, match=reason):
        spec_of(**changes)


def test_the_reason_against_one_call_and_against_ranks_is_named() -> None:
    assert why_not(spec_of()) == "it has several streams of hidden states"
    with pytest.raises(UnusableModel, match="has several streams of hidden states"):
        divided(spec_of(), 2)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_only_the_largest_gates_are_kept(share: float) -> None:
    gates = torch.randn(5, 4096, generator=torch.Generator().manual_seed(1)) * 3 + 1
    kept = gates.clone()
    keep_largest(kept, NormalDist().inv_cdf(share))
    for before, after in zip(gates, kept, strict=True):
        assert (after == 0).float().mean() == pytest.approx(share, abs=0.02)
        limit = torch.quantile(before, share)
        torch.testing.assert_close(after, (before - limit).clamp(min=0), atol=0.2, rtol=0)


def test_the_gates_of_a_row_have_the_same_bits_beside_others() -> None:
    gates = torch.randn(7, 3 * 96, generator=torch.Generator().manual_seed(2))
    together = gates.clone()
    keep_largest(together, 0.5)
    for row, whole in zip(gates, together, strict=True):
        alone = row[None].clone()
        keep_largest(alone, 0.5)
        assert torch.equal(alone[0], whole)
