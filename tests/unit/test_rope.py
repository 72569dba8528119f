"""Rotary embeddings: the frequencies equal those of transformers, and scores depend only on the
distance of positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from worker.errors import UnusableModel
from worker.layers.rope import attention_factor, inverse_frequencies, rotate, rotation
from worker.spec.families.registry import find_family
from worker.spec.rope_config import FactorScaling, RopeConfig

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}


def rope_of(changes: dict[str, Any]) -> RopeConfig:
    config = SIZES | changes
    rope = find_family(config).spec(config).layers[0].attention.rope
    assert rope is not None
    return rope


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters: dict[str, Any] = KINDS[kind]
    theirs = LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=dict(parameters)))
    ours = rope_of({"rope_parameters": parameters})
    torch.testing.assert_close(inverse_frequencies(ours), theirs.inv_freq)
    assert attention_factor(ours) == pytest.approx(theirs.attention_scaling)


def test_older_rope_configs_are_read_as_newer_ones() -> None:
    older = {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}}
    assert rope_of(older) == rope_of({"rope_parameters": KINDS["llama3"]})


def test_factors_divide_each_frequency_by_its_own() -> None:
    plain = inverse_frequencies(RopeConfig(8, 10000.0))
    scaled = inverse_frequencies(RopeConfig(8, 10000.0, FactorScaling((1.0, 2.0, 4.0, 8.0))))
    torch.testing.assert_close(plain / scaled, torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_scores_depend_on_distance_alone() -> None:
    inv_freq = inverse_frequencies(RopeConfig(64, 10000.0))
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(1))

    def score(query_at: int, key_at: int) -> float:
        rotated = [
            rotate(x, *rotation(torch.tensor([at]), inv_freq, torch.float32))
            for x, at in ((q, query_at), (k, key_at))
        ]
        return float((rotated[0] * rotated[1]).sum())

    assert score(57, 40) == pytest.approx(score(17, 0), abs=1e-4)
    assert score(0, 0) == pytest.approx(float((q * k).sum()), abs=1e-4)
    assert score(17, 0) != pytest.approx(score(0, 17), abs=1e-2)


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(UnusableModel, match="rope_type 'dynamic' is not supported"):
        rope_of({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
