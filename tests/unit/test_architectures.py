"""The architectures that transformers computes, and those that are refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from worker.loading.errors import UnusableModel
from worker.models.architectures import (
    CHECKED,
    INLINE_ATTENTION,
    MASKED_WINDOWS,
    OWN_ATTENTION,
    REFUSED,
    fallback,
)
from worker.models.families.registry import FAMILIES, find_family

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
    if not transformers.__version__.startswith("5.23."):
        pytest.skip("the lists are those of transformers 5.23")
    assert decoders().keys() - OURS - CHECKED.keys() - REFUSED.keys() == set()


def test_no_architecture_is_both_computed_and_refused() -> None:
    assert not CHECKED.keys() & REFUSED.keys()
    assert CHECKED.keys() >= OWN_ATTENTION.keys() | MASKED_WINDOWS.keys() | INLINE_ATTENTION.keys()
    assert len(set(CHECKED.values())) == len(CHECKED)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("DeepseekV3ForCausalLM", "multi-head latent attention"),
        ("RwkvForCausalLM", "state-space, recurrent"),
        ("T5ForConditionalGeneration", "encoder-decoder"),
        ("BertLMHeadModel", "sees later tokens"),
        ("Gemma3nForCausalLM", "share keys and values"),
        ("BloomForCausalLM", "computes attention itself"),
    ],
)
def test_a_refusal_names_the_reason(architecture: str, reason: str) -> None:
    message = refusal(architectures=[architecture])
    assert message.startswith(f"architecture ['{architecture}'] is not supported: ")
    assert reason in message


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


def test_configs_that_no_family_reads_are_left_to_transformers() -> None:
    found = fallback({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True})
    assert found is not None
    assert found.model_type == "stablelm"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "layers of type 'linear_attention' are not supported for GraniteMoeHybridForCausalLM"),
        ({"layer_types": ["attention"] * 31 + ["mamba"]}, "layers of type 'mamba'"),
        ({"layers_block_type": ["mamba"] * 32}, "layers of type 'mamba'"),
        ({"layer_types": ["sliding_attention"] * 32}, "layers of type 'sliding_attention'"),
        ({"layer_types": ["attention"] * 32}, "num_local_experts 8 is not supported"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
    ],
    ids=str,
)
def test_a_granite_4_with_other_layers_or_experts_is_refused(
    values: dict[str, Any], message: str
) -> None:
    config = {"model_type": "granitemoehybrid", **values}
    with pytest.raises(UnusableModel, match=message):
        find_family(config).spec(config)


def test_the_model_type_suffices() -> None:
    found = fallback({"model_type": "olmo"})
    assert found is not None
    assert found.name == "OlmoForCausalLM"


@pytest.mark.parametrize("architectures", [None, [], ["A", "B"], "OlmoForCausalLM", ["Unknown"]])
def test_anything_else_is_left_to_the_families(architectures: Any) -> None:
    assert fallback({"architectures": architectures}) is None
