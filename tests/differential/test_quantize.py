"""GGUF files that are written from safetensors: the weights are those of the source up to the error
of their type, and so are config and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from protocol.tools.quantize import TYPES
from tests.support.checkpoints import LLAMA3_ROPE, TEMPLATE, random_llama, write_directory
from tests.support.eager import EagerStepper, load, some_tokens
from tests.support.family_models import (
    DENSE_GRANITE,
    LINEAR,
    STRETCHED,
    VARIANTS,
    WINDOW,
    YARN,
    random_model,
)
from tests.support.quantized_files import FORMATS, write_quantized
from worker.errors import UnusableModel
from worker.loading.decoder import LoadedModel
from worker.quantize.writing import quantize_model

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "initializer_range": 0.03,
}
STEPS = {"Q4_0": 7, "Q4_1": 7.5, "Q5_0": 15, "Q5_1": 15.5, "Q8_0": 127, "Q4_K": 7, "Q5_K": 14}
STEPS |= {"Q6_K": 30, "Q4_K_M": 7}
"""Type -> steps between zero and the largest number of a block."""


def written(path: Path, model: Any, wanted: str = "Q8_0") -> tuple[LoadedModel, LoadedModel]:
    """Return a model as it is, and as it is read from the GGUF file."""
    source, output = write_directory(path / "source", model), path / "tiny.gguf"
    quantize_model(source, output, wanted, lambda *progress: None)
    return load(source), load(output)


def assert_near(ours: LoadedModel, theirs: LoadedModel, steps: float) -> None:
    found, wanted = [list(each.model.weights.tensors()) for each in (ours, theirs)]
    assert [each.shape for each in found] == [each.shape for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= other.abs().max() / steps


@pytest.mark.parametrize("wanted", TYPES)
def test_each_type_keeps_the_numbers_up_to_its_step(tmp_path: Path, wanted: str) -> None:
    theirs, ours = written(tmp_path, random_llama(**WIDE), wanted)
    assert_near(ours, theirs, STEPS[wanted])
    tokens = some_tokens(16)
    logits = [EagerStepper(each, [tokens]).run([(16,)])[0] for each in (ours, theirs)]
    errors = (logits[0] - logits[1]).norm(dim=1) / logits[1].norm(dim=1)
    assert errors.median() <= 4 / STEPS[wanted]


STORED: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5000.0}},
    "mistral": {"sliding_window": 24, "rope_parameters": YARN},
    "mixtral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma3_text": {"query_pre_attn_scalar": 32, "num_hidden_layers": 6},
    "phi3": {},
    "olmo3": WINDOW,
    "granite": {"rope_parameters": LINEAR},
    "granitemoehybrid": DENSE_GRANITE
    | {"position_embedding_type": "nope", "layer_types": ["full_attention"] * 2},
    "cohere2": WINDOW,
    "starcoder2": {},
    "gpt2": {},
    "gpt_neox": {},
    "hunyuan_v1_dense": STRETCHED,
}
"""model_type -> options that its GGUF files store."""
UNSTORED: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_moe": ({}, "layers[0].mlp.renormalize is False and would be read as True"),
    "gemma2": ({}, "layers[0].attention.scale"),
    "gpt2": ({"scale_attn_weights": False}, "layers[0].attention.scale is 1.0"),
    "phi3": (VARIANTS["phi3"]["long rope"], "attention.rope.scaling is 'LongRopeScaling'"),
    "ministral": ({}, "MinistralForCausalLM cannot be written as a GGUF file"),
    "granitemoehybrid": ({}, "GraniteMoeHybridForCausalLM cannot be written as a GGUF file"),
    "gemma3n_text": ({}, "Gemma3nForCausalLM cannot be written as a GGUF file"),
    "apertus": ({}, "ApertusForCausalLM cannot be written as a GGUF file"),
    "phimoe": ({}, "PhimoeForCausalLM cannot be written as a GGUF file"),
    "llama4_text": ({"moe_layers": []}, "Llama4ForCausalLM cannot be written as a GGUF file"),
    "jamba": ({}, "JambaForCausalLM cannot be written as a GGUF file"),
    "qwen2_moe": ({}, "Qwen2MoeForCausalLM cannot be written as a GGUF file"),
    "qwen3_next": ({}, "Qwen3NextForCausalLM cannot be written as a GGUF file"),
    "gpt_oss": ({}, "GptOssForCausalLM cannot be written as a GGUF file"),
}
"""model_type -> options that its GGUF files do not store, and the refusal."""


@pytest.mark.parametrize("model_type", STORED)
def test_every_kind_of_family_is_written(tmp_path: Path, model_type: str) -> None:
    changes = {"num_hidden_layers": 2} | STORED[model_type]
    theirs, ours = written(tmp_path, random_model(model_type, **changes))
    assert_near(ours, theirs, STEPS["Q8_0"])


@pytest.mark.parametrize("model_type", UNSTORED)
def test_a_model_that_a_gguf_file_cannot_store_is_refused(tmp_path: Path, model_type: str) -> None:
    changes, message = UNSTORED[model_type]
    with pytest.raises(UnusableModel) as refused:
        written(tmp_path, random_model(model_type, **changes))
    assert message in refused.value.message
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_a_quantised_checkpoint_is_written_too(tmp_path: Path) -> None:
    source, _ = write_quantized(tmp_path, random_llama(num_hidden_layers=1), FORMATS["awq"])
    quantize_model(source, tmp_path / "tiny.gguf", "Q8_0", lambda *progress: None)
    assert_near(load(tmp_path / "tiny.gguf"), load(source), STEPS["Q8_0"])


def test_the_card_is_that_of_the_source_and_progress_ends_at_the_whole(tmp_path: Path) -> None:
    source = write_directory(tmp_path / "source", random_llama(num_hidden_layers=1))
    progress: list[tuple[str, int, int]] = []
    quantize_model(source, tmp_path / "tiny.gguf", "Q4_0", lambda *each: progress.append(each))
    theirs, ours = load(source).card, load(tmp_path / "tiny.gguf").card
    for name in ("bos_token_id", "chat_template", "defaults", "context_tokens"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert set(ours.eos_token_ids) == set(theirs.eos_token_ids)
    for role in ("bos_token", "eos_token"):
        assert ours.special_tokens[role] == theirs.special_tokens[role]
    assert ours.num_parameters == theirs.num_parameters
    tokenizers = [Tokenizer.from_str(card.tokenizer.decode()) for card in (ours, theirs)]
    for text in ("the <|start|> cat's\n\n  hat 123 \u00e9", TEMPLATE, " " * 9):
        assert tokenizers[0].encode(text).ids == tokenizers[1].encode(text).ids
    done, total = zip(*((each[1], each[2]) for each in progress), strict=True)
    assert sorted(done) == list(done)
    assert done[-1] == total[-1]


def test_an_interrupted_file_is_removed(tmp_path: Path) -> None:
    def interrupt(*progress: object) -> None:
        raise KeyboardInterrupt

    source = write_directory(tmp_path / "source", random_llama(num_hidden_layers=1))
    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, tmp_path / "tiny.gguf", "Q8_0", interrupt)
    assert [each.name for each in tmp_path.iterdir()] == ["source"]
