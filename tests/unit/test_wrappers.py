"""The config and the tensor names of the text part of a model of images or sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from worker.errors import UnusableModel
from worker.spec.families.registry import find_family
from worker.spec.quantization import read_quantization
from worker.spec.wrappers import text_name, text_part
from worker.startup.check_config import check_config

GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
"""As published, without keys that no reader needs."""


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(UnusableModel) as refused:
        text_part(config)
    return refused.value.message


def test_the_text_part_of_a_published_config_is_a_decoders() -> None:
    part = text_part(GEMMA_3_4B)
    assert part is not None
    spec = find_family(part).spec(part)
    assert (spec.architecture, spec.hidden, len(spec.layers)) == ("Gemma3ForCausalLM", 2560, 34)
    assert spec.layers[0].attention.num_kv_heads == 4
    assert part["eos_token_id"] == [1, 106]


KIMI_K2_5 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "media_placeholder_token_id": 163605,
    "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "max_position_embeddings": 262144,
        "vocab_size": 163840,
        "num_nextn_predict_layers": 0,
        "topk_method": "noaux_tc",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": False,
                        "group_size": 32,
                        "num_bits": 4,
                        "observer": "minmax",
                        "observer_kwargs": {},
                        "strategy": "group",
                        "symmetric": True,
                        "type": "int",
                    },
                }
            },
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        },
    },
    "vision_config": {"patch_size": 14},
}
"""As published, without keys that no reader needs."""


def test_the_text_part_of_kimi_k2_5_is_a_deepseek_v3_with_quantised_experts() -> None:
    part = text_part(KIMI_K2_5)
    assert part is not None
    family = find_family(part)
    assert family.model_type == "deepseek_v3"
    spec = family.spec(part)
    assert (spec.hidden, spec.num_layers, spec.mlps[1].num_experts) == (7168, 61, 384)
    found = read_quantization(part)
    assert found is not None
    (scheme,) = found.schemes
    assert (scheme.layout, scheme.bits, scheme.block) == ("packed", 4, (1, 32))


def test_a_config_of_another_model_has_no_text_part() -> None:
    for architectures in (None, [], ["LlamaForCausalLM"], ["NewForConditionalGeneration"]):
        assert text_part({"architectures": architectures, "text_config": {}}) is None


def test_a_text_part_that_is_not_served_is_named() -> None:
    config = {**GEMMA_3_4B, "text_config": {"model_type": "mamba"}}
    assert refusal(config) == (
        "the text part of Gemma3ForConditionalGeneration is a 'mamba', which is not supported; "
        "supported: gemma3_text"
    )
    del config["text_config"]
    assert refusal(config).endswith("has no text_config")


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.language_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.text_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("model.visual.blocks.0.attn.qkv.bias", None),
        ("vision_tower.vision_model.encoder.layers.0.layer_norm1.weight", None),
        ("model.multi_modal_projector.linear_1.weight", None),
        ("model.connector.modality_projection.proj.weight", None),
        ("audio_tower.conv1.weight", None),
        ("mm_projector.proj.0.weight", None),
        ("vision_tower.encoder.blocks.0.wqkv.weight", None),
        (
            "language_model.model.layers.1.mlp.experts.0.up_proj.weight_packed",
            "model.layers.1.mlp.experts.0.up_proj.weight_packed",
        ),
        ("model.embed_vision.embedding_projection.weight", None),
        ("model.embed_audio.embedding.weight", None),
        (
            "model.language_model.embed_tokens_per_layer.weight",
            "model.embed_tokens_per_layer.weight",
        ),
        ("model.language_model.altup_projections.2.weight", "model.altup_projections.2.weight"),
        ("image_newline", None),
        ("unknown.weight", "unknown.weight"),  # and is refused
    ],
)
def test_tensors_have_the_names_of_the_decoder_alone(stored: str, name: str | None) -> None:
    assert text_name(stored) == name


def test_a_config_is_checked_before_the_weights_are_downloaded(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GEMMA_3_4B))
    check_config(file)
    file.write_text(json.dumps({**GEMMA_3_4B, "text_config": {"model_type": "mamba"}}))
    with pytest.raises(UnusableModel):
        check_config(file)
