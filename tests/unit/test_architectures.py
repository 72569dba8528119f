"""The architectures that transformers computes, and those that are refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from worker.errors import UnusableModel
from worker.spec.architectures import (
    BORROWED,
    BORROWED_OWN_CACHE,
    CHECKED,
    INLINE_ATTENTION,
    OWN_ATTENTION,
    OWN_CACHE,
    REFUSED,
    TransformersArchitecture,
    fallback,
)
from worker.spec.families.registry import FAMILIES, find_family
from worker.spec.kv_blocks import check_chunks
from worker.spec.tensors import ModelTensors
from worker.spec.wrappers import WRAPPERS

OURS = {family.architecture for family in FAMILIES}


def decoders() -> dict[str, str]:
    """Return the model type of each causal language model of transformers, by class name."""
    return {
        name: model_type
        for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        for name in ((names,) if isinstance(names, str) else names)
    }


def refusal(**config: Any) -> str:
    with pytest.raises(UnusableModel) as refused:
        fallback(config)
    assert "\n" not in refused.value.message
    return refused.value.message


def test_every_decoder_of_transformers_is_computed_or_refused_with_a_reason() -> None:
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("the lists are those of transformers 5.24")
    served = OURS | CHECKED.keys() | OWN_CACHE.keys() | WRAPPERS.keys()
    assert not (OURS | CHECKED.keys()) & OWN_CACHE.keys()
    unlisted = decoders().keys() - served - REFUSED.keys()
    assert [name for name in unlisted if not name.endswith("ForConditionalGeneration")] == []


def test_every_type_whose_models_another_class_computes_is_listed() -> None:
    """Such a type has a config class, but no class of a model of its own."""
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("the lists are those of transformers 5.24")
    own = {family.model_type for family in FAMILIES} | set(CHECKED.values())
    found = {
        kind: name
        for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if name in CHECKED.keys() | OURS and kind not in own
    }
    listed = {kind: name for kind, (name, _) in BORROWED.items() if name not in OWN_CACHE}
    found.pop("gpt-sw3")  # its config is that of GPT-2
    wrappers = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
    wrappers["llama4"] = "Llama4ForCausalLM"
    assert found == listed | wrappers


@pytest.mark.parametrize("kind", BORROWED)
def test_a_type_that_another_class_computes_does_not_contradict_its_architecture(kind: str) -> None:
    name, published = BORROWED[kind]
    for architectures in (None, [name], [published]):
        config = {"architectures": architectures, "model_type": kind}
        keeps = name in OWN_CACHE or kind in BORROWED_OWN_CACHE
        expected = TransformersArchitecture(name, kind, has_own_cache=keeps)
        assert fallback(config) == expected
    assert fallback({"architectures": ["OtherModel"], "model_type": kind}) is None


MANY_MEDIA = {
    name
    for names in (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    for name in names.values()
    if name.endswith("ForConditionalGeneration") and name not in WRAPPERS
}


@pytest.mark.parametrize("architecture", sorted(MANY_MEDIA))
def test_the_refusal_of_a_model_of_images_or_audio_or_with_an_encoder_has_the_reason(
    architecture: str,
) -> None:
    message = refusal(architectures=[architecture])
    assert message.startswith(f"architecture ['{architecture}'] is not supported: it ")
    assert "images or audio" in message or "encoder" in message


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"vision_config": {}}, "it is a model of images or audio, or works on bytes"),
        ({"audio_token_id": 7}, "it is a model of images or audio, or works on bytes"),
        ({"is_encoder_decoder": True}, "it is an encoder-decoder, or the decoder of one"),
    ],
)
def test_an_unknown_architecture_is_judged_by_its_config(keys: dict[str, Any], reason: str) -> None:
    assert refusal(architectures=["New2Text"], **keys).endswith(f"is not supported: {reason}")


def test_the_refusal_of_an_unknown_architecture_says_which_are_supported() -> None:
    for config in ({"architectures": ["NewForCausalLM"]}, {"model_type": "new"}):
        assert fallback(config) is None
        with pytest.raises(UnusableModel) as refused:
            find_family(config)
        message = refused.value.message
        assert message.endswith(
            "and through transformers (the extra tidegate[transformers]) those that "
            "docs/models/transformers.md lists"
        )
        assert "lama" in message
        assert "..." not in message


def test_kimi_k2_is_a_deepseek_v3() -> None:
    """Published configs name the class of DeepSeek V3 and a type of their own."""
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
    assert find_family(config).model_type == "deepseek_v3"
    assert fallback(config) is None


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}),
        ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True, "num_experts_per_tok": 6}),
        ("KimiLinearForCausalLM", {"mla_use_nope": False}),
        ("KimiLinearForCausalLM", {"moe_layer_freq": 2}),
    ],
)
def test_what_the_class_ignores_and_the_publisher_reads_is_refused(
    architecture: str, values: dict[str, Any]
) -> None:
    family = find_family({"architectures": [architecture]})
    usual = {key: value for key, value in values.items() if key == "num_experts_per_tok"}
    family.spec(usual)
    with pytest.raises(UnusableModel, match=next(iter(values))):
        family.spec(values)


def test_no_architecture_is_both_computed_and_refused() -> None:
    assert not (CHECKED.keys() | OWN_CACHE.keys()) & REFUSED.keys()
    assert CHECKED.keys() >= OWN_ATTENTION.keys() | INLINE_ATTENTION.keys()
    assert len(set(CHECKED.values())) == len(CHECKED)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("T5ForConditionalGeneration", "encoder-decoder"),
        ("BertLMHeadModel", "sees later tokens"),
    ],
)
def test_a_refusal_names_the_reason(architecture: str, reason: str) -> None:
    message = refusal(architectures=[architecture])
    assert message.startswith(f"architecture ['{architecture}'] is not supported: ")
    assert reason in message


@pytest.mark.parametrize("architecture", OWN_CACHE)
def test_a_class_with_a_cache_of_its_own_is_computed_by_transformers(architecture: str) -> None:
    config = {"architectures": [architecture], "model_type": "kind"}
    found = fallback(config)
    assert found == TransformersArchitecture(architecture, "kind", has_own_cache=True)
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    assert refusal(**config, **quantized).startswith(f"quantised weights of {architecture} ")
    assert refusal(architectures=[architecture]).endswith("has no 'model_type'")


def test_the_text_part_of_an_unlisted_model_of_images_is_computed_by_transformers() -> None:
    config: dict[str, Any] = {
        "architectures": ["NewForConditionalGeneration"],
        "model_type": "new",
        "vision_config": {},
    }
    assert "images or audio" in refusal(**config)
    found = fallback({**config, "text_config": {}})
    assert found == TransformersArchitecture(config["architectures"][0], "new", has_own_cache=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"is_causal": False}, "is_causal False"),
        ({"model_type": "llama"}, "has the model_type 'olmo', not 'llama'"),
    ],
)
def test_a_key_that_would_change_the_result_is_refused(
    values: dict[str, Any], message: str
) -> None:
    assert message in refusal(architectures=["OlmoForCausalLM"], **values)


def test_an_architecture_is_served_though_its_config_names_code() -> None:
    config = {"model_type": "olmo", "auto_map": {"AutoModelForCausalLM": "modeling.Olmo"}}
    found = fallback({"architectures": ["OlmoForCausalLM"], **config})
    assert found is not None
    assert found.name == "OlmoForCausalLM"


@pytest.mark.parametrize("architecture", sorted(OURS))
def test_a_family_is_preferred(architecture: str) -> None:
    assert fallback({"architectures": [architecture]}) is None


def test_the_name_that_published_configs_give_a_class_is_read() -> None:
    config = {"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe"}
    assert fallback(config) is None
    assert find_family(config).spec(config).architecture == "PhimoeForCausalLM"
    with pytest.raises(UnusableModel, match="contradicts itself"):
        find_family(config | {"model_type": "mixtral"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts": 1}, "num_experts is 1; it must be above one"),
        ({"moe_topk": [2, 3]}, "moe_topk must be an integer, or a list"),
        ({"moe_topk": ["2"] * 32}, "moe_topk must be an integer, or a list"),
    ],
)
def test_a_hunyuan_that_is_not_supported_is_refused(values: dict[str, Any], message: str) -> None:
    config = {"model_type": "hunyuan_v1_moe", "num_experts": 8, **values}
    with pytest.raises(UnusableModel) as refused:
        find_family(config).spec(config)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"no_rope_layers": [1, 2]}, "no_rope_layers must have a 0 or a 1 for each of the 48"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; it must be above zero"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0; it must be above zero"),
        ({"floor_scale": 0}, "floor_scale is 0; it must be above zero"),
        ({"moe_layers": [True]}, "moe_layers is [True], not a list of integers"),
        ({"num_local_experts": 1}, "num_local_experts is 1; it must be above one"),
        ({"layer_types": ["sliding_attention"] * 48}, "layers of type 'sliding_attention'"),
    ],
)
def test_a_llama_4_that_is_not_supported_is_refused(values: dict[str, Any], message: str) -> None:
    config = {"model_type": "llama4_text", **values}
    with pytest.raises(UnusableModel) as refused:
        find_family(config).spec(config)
    assert message in refused.value.message


def test_blocks_must_divide_the_chunks_of_a_model() -> None:
    config = {"model_type": "llama4_text", "attention_chunk_size": 24}
    spec = find_family(config).spec(config)
    check_chunks(spec, 8)
    with pytest.raises(UnusableModel, match="blocks of 16 tokens do not divide"):
        check_chunks(spec, 16)


def test_configs_that_no_family_reads_are_left_to_transformers() -> None:
    found = fallback({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True})
    assert found is not None
    assert found.model_type == "stablelm"


MIXED = {"layer_types": ["attention"] + ["mamba"] * 31}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 32}, "layers of type 'sliding_attention'"),
        ({**MIXED, "mamba_d_head": 7}, "mamba_d_head 7 times mamba_n_heads 128 is not 8192"),
        ({**MIXED, "mamba_n_groups": 3}, "128 heads of a Mamba layer cannot share 3 groups"),
        ({**MIXED, "time_step_limit": [2.0, 1.0]}, "time_step_limit is"),
        ({**MIXED, "time_step_limit": [0.0]}, "'time_step_limit' is"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
    ],
    ids=str,
)
def test_a_granite_4_that_contradicts_itself_is_refused(
    values: dict[str, Any], message: str
) -> None:
    config = {"model_type": "granitemoehybrid", **values}
    with pytest.raises(UnusableModel, match=message):
        find_family(config).spec(config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attn_layer_offset": 8}, "attn_layer_offset is 8; it must be at least 0, and below"),
        ({"expert_layer_period": 0}, "expert_layer_offset is 1; it must be at least 0, and below"),
        ({"mamba_dt_rank": "full"}, "'mamba_dt_rank' is 'full'"),
        ({"mamba_d_conv": 1}, "a convolution of 1 tokens is not supported"),
        ({"mamba_d_state": 0}, "a dimension of a recurrent layer is not above zero"),
        ({"mamba_inner_layernorms": False}, "mamba_inner_layernorms False is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_experts_per_tok": 17}, "17 of 16 experts cannot be chosen"),
    ],
    ids=str,
)
def test_a_jamba_that_is_not_supported_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableModel, match=message):
        find_family({"model_type": "jamba"}).spec({"model_type": "jamba", **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lru_width": 2555}, "lru_width is 2555, which 10 heads cannot share evenly"),
        ({"num_attention_heads": 0}, "lru_width is 2560, which 0 heads cannot share evenly"),
        ({"conv1d_width": 1}, "a convolution of 1 tokens is not supported"),
        ({"block_types": []}, r"block_types is \[\]; it must be a list of kinds of layers"),
        ({"block_types": ["attention", "conv"]}, "block_types has 'conv', which is not supported"),
        ({"block_types": None}, "'block_types' is null"),
        ({"attention_window_size": 0}, "sliding_window is 0; it must be above zero"),
        ({"logits_soft_cap": 0.0}, "'logits_soft_cap'"),
        ({"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ({"embeddings_scale_by_sqrt_dim": False}, "embeddings_scale_by_sqrt_dim False is not"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "scaled rotary embeddings"),
    ],
    ids=str,
)
def test_a_recurrent_gemma_that_is_not_supported_is_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnusableModel, match=message):
        find_family({"model_type": "recurrent_gemma"}).spec(values)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("granitemoehybrid", {}),
        ("granitemoehybrid", {"layers_block_type": ["mamba"] * 32}),
        ("jamba", {"num_hidden_layers": 4}),
        ("nemotron_h", {"hybrid_override_pattern": "MM-E"}),
        ("lfm2", {"layer_types": ["conv"] * 32}),
        ("recurrent_gemma", {"block_types": ["recurrent"]}),
        ("qwen3_next", {"full_attention_interval": 50}),
        ("mamba2", {}),
    ],
    ids=str,
)
def test_a_model_may_have_no_attention(model_type: str, values: dict[str, Any]) -> None:
    family = find_family({"model_type": model_type})
    spec = family.spec(values)
    assert (spec.num_kv_layers, spec.window) == (0, None)
    assert not spec.layer_heads
    assert not spec.windows
    assert spec.state_items
    assert [*ModelTensors(spec, family.names(spec)).tensors()]


def test_layers_without_any_token_mixer_are_refused() -> None:
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": "--E"}
    with pytest.raises(UnusableModel, match="models without attention and recurrent layers are"):
        find_family(config).spec(config)


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("mamba", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("mamba", {"mixer_rms_eps": 1e-5}, "mixer_rms_eps 1e-05 is not supported for mamba"),
        ("mamba", {"time_step_rank": "full"}, "'time_step_rank' is 'full'"),
        ("falcon_mamba", {"conv_kernel": 1}, "a convolution of 1 tokens is not supported"),
        ("mamba2", {"num_heads": 96}, "96 heads of 64 are not 8192, which is expand times hidden"),
        ("mamba2", {"n_groups": 3}, "128 heads of a Mamba layer cannot share 3 groups"),
        ("mamba2", {"time_step_limit": [0.0]}, "'time_step_limit' is"),
    ],
    ids=str,
)
def test_a_mamba_that_is_not_supported_is_refused(
    model_type: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnusableModel, match=message):
        find_family({"model_type": model_type}).spec(values)


def test_the_model_type_suffices() -> None:
    found = fallback({"model_type": "olmo"})
    assert found is not None
    assert found.name == "OlmoForCausalLM"


@pytest.mark.parametrize("architectures", [None, [], ["A", "B"], "OlmoForCausalLM", ["Unknown"]])
def test_anything_else_is_left_to_the_families(architectures: Any) -> None:
    assert fallback({"architectures": architectures}) is None
