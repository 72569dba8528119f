"""The bytes of a token's keys and values, which docs/models/families.md lists for each family,
against the arithmetic of the family's config class in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from tests.support.family_models import WITHOUT_ATTENTION
from worker.list_families import kv_bytes
from worker.spec.families.family import ModelFamily
from worker.spec.families.registry import FAMILIES

ATTENTION = {
    *("attention", "full_attention", "sliding_attention", "chunked_attention"),
    "indexed_attention",
}
"""Kinds of layers that have attention."""


def attention_kinds(config: Any) -> list[str]:
    """Return the kind of each layer with keys and values of its own."""
    count = config.num_hidden_layers
    if config.model_type in WITHOUT_ATTENTION:
        return []
    kinds = getattr(config, "layer_types", None) or ["attention"] * count
    if config.model_type == "bamba":
        kinds = [
            "attention" if i in (config.attn_layer_indices or ()) else "" for i in range(count)
        ]
    if config.model_type == "jamba":
        period, offset = config.attn_layer_period, config.attn_layer_offset
        kinds = ["attention" if i % period == offset else "" for i in range(count)]
    if config.model_type == "falcon_h1":
        kinds = ["attention"] * count
    shared = getattr(config, "num_kv_shared_layers", 0)
    return [kind for kind in kinds[: count - shared] if kind in ATTENTION]


def stored_numbers(config: Any, kind: str) -> int:
    """Return how many numbers a layer stores for a token."""
    if rank := getattr(config, "kv_lora_rank", 0):
        return int(rank + config.qk_rope_head_dim + getattr(config, "index_head_dim", 0))
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.model_type == "gemma4_text" and kind == "full_attention":
        full = config.per_layer_config[kind]
        heads, dim = full.num_key_value_heads, full.head_dim
    return 2 * int(heads) * int(dim)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_the_bytes_of_a_token_are_those_of_the_config(family: ModelFamily) -> None:
    config = transformers.AutoConfig.for_model(
        family.model_type, **{**family.needed, **family.typical}
    )
    config.allow_global_per_layer_attribute_access = True
    numbers = sum(stored_numbers(config, kind) for kind in attention_kinds(config))
    assert kv_bytes(family) == 2 * numbers


def test_a_token_of_deepseek_v3_takes_a_seventieth_of_what_its_heads_would_take() -> None:
    (family,) = (each for each in FAMILIES if each.model_type == "deepseek_v3")
    of_heads = 2 * 61 * 128 * (128 + 64 + 128)
    assert kv_bytes(family) == 2 * 61 * (512 + 64)
    assert of_heads / kv_bytes(family) == pytest.approx(71, abs=0.2)


def test_a_token_of_deepseek_v32_has_an_index_key_of_128_numbers_in_each_layer() -> None:
    (v3, v32) = (
        kv_bytes(each) for each in FAMILIES if each.model_type in ("deepseek_v3", "deepseek_v32")
    )
    assert v32 - v3 == 2 * 61 * 128
