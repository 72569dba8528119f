"""The text part of a model of images or sound gives the logits that transformers gives for text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.checkpoints import write_directory
from tests.support.eager import EagerStepper, assert_same, load, some_tokens
from tests.support.wrapper_models import CASES, random_wrapper, write_wrapper
from worker.loading.header import read_header
from worker.spec.families.registry import find_family
from worker.spec.wrappers import WRAPPERS, text_part

NUM_TOKENS = 61


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return the logits of a text. The class of Llama 4 calls its text part, and then fails."""
    if model.config.model_type == "llama4":
        model = model.language_model
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits.float()


def check(directory: Path, logits: torch.Tensor, tokens: list[int]) -> None:
    atol = 1e-4 * max(1.0, float(logits.abs().max()) / 10)
    loaded = load(directory)
    for steps in [(NUM_TOKENS,)], [(20,), (1,), (40,)]:
        assert_same(EagerStepper(loaded, [tokens]).run(steps)[0], logits, atol)


@pytest.mark.parametrize(("architecture", "kind"), CASES, ids=[f"{a} {b}" for a, b in CASES])
def test_the_logits_of_a_text_are_those_of_transformers(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    model, tokens = random_wrapper(architecture, kind), some_tokens(NUM_TOKENS)
    check(write_wrapper(tmp_path, model), logits_of(model, tokens), tokens)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Gemma3ForConditionalGeneration", "gemma3_text"),
        ("Mistral3ForConditionalGeneration", "mistral"),
    ],
)
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_files_show_whether_the_embeddings_are_also_the_head(
    tmp_path: Path, name: str, kind: str, is_tied: bool
) -> None:
    """Published configs of these two do not say it."""
    model, tokens = random_wrapper(name, kind), some_tokens(NUM_TOKENS)
    directory = write_directory(tmp_path, model)
    config = json.loads((directory / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.pop("tie_word_embeddings", None)
    (directory / "config.json").write_text(json.dumps(config))
    if not is_tied:
        head = torch.randn_like(model.lm_head.weight)
        model.lm_head.weight = torch.nn.Parameter(head)
        tensors = load_file(directory / "model.safetensors")
        tensors["language_model.lm_head.weight"] = head
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    check(directory, logits_of(model, tokens), tokens)


def test_a_config_of_an_older_release_has_the_text_part_at_its_top(tmp_path: Path) -> None:
    """So are published those of Qwen2-VL and Qwen2.5-VL, with a rope of type "mrope"."""
    model = random_wrapper("Qwen2VLForConditionalGeneration", "qwen2_vl_text")
    tokens = some_tokens(NUM_TOKENS)
    directory = write_directory(tmp_path, model)
    config = json.loads((directory / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config = {
        **text,
        **config,
        "model_type": "qwen2_vl",
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (directory / "config.json").write_text(json.dumps(config))
    check(directory, logits_of(model, tokens), tokens)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("glm4v_text", {"num_attention_heads": 16}),
        ("glm4v_moe_text", {"head_dim": 128}),
        ("glm_ocr_text", {"hidden_size": 512}),
    ],
)
def test_a_key_that_a_text_part_lacks_has_the_default_of_its_own_class(
    kind: str, sizes: dict[str, int]
) -> None:
    """Others are those of the decoder that computes it."""
    (architecture,) = (name for name, kinds in WRAPPERS.items() if kinds == {kind})
    whole = CONFIG_MAPPING[kind](**sizes).to_dict()
    specs = []
    for text in ({"model_type": kind, **sizes}, whole):
        part = text_part({"architectures": [architecture], "text_config": text})
        assert part is not None
        specs.append(find_family(part).spec(part))
    assert specs[0] == specs[1]
    attention = specs[0].attentions[0]
    assert attention.rope is not None
    turned = whole["rope_parameters"].get("partial_rotary_factor", 1.0)
    assert attention.rope.width == turned * attention.head_dim
    assert attention.qkv_bias == (kind != "glm_ocr_text")


@pytest.mark.parametrize("is_transposed", [True, False])
def test_experts_are_read_as_published_and_as_transformers_writes_them(
    tmp_path: Path, is_transposed: bool
) -> None:
    kind = "qwen3_vl_moe_text"
    model, tokens = random_wrapper("Qwen3VLMoeForConditionalGeneration", kind), some_tokens(61)
    directory = write_directory(tmp_path, model)
    hidden = model.config.text_config.hidden_size
    tensors = load_file(directory / "model.safetensors")
    experts = [name for name in tensors if ".mlp.experts." in name]
    assert experts
    for name in experts:
        tensor = tensors[name]
        is_by_rows = tensor.shape[1 if name.endswith("down_proj") else 2] == hidden
        if is_by_rows is is_transposed:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    check(directory, logits_of(model, tokens), tokens)


def test_the_log_says_that_the_other_parts_are_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_wrapper("LlavaForConditionalGeneration", "llama")
    directory = write_directory(tmp_path, model)
    others = [name for name in model.state_dict() if "language_model" not in name]
    with caplog.at_level("INFO"):
        read_header(directory)
    assert f"({len(others) - 1} tensors of other parts are skipped)" in caplog.text  # - the head


@pytest.mark.parametrize(
    "architecture", ["GlmOcr", "Qwen3_5ForConditionalGeneration", "Qwen3_5Moe"]
)
def test_layers_for_drafts_in_the_files_are_not_used(tmp_path: Path, architecture: str) -> None:
    """Published files of Qwen3.5 hold tensors whose names begin with `mtp.`, those of GLM-OCR a
    layer after the others."""
    name = next(each for each in WRAPPERS if each.startswith(architecture))
    (kind,) = WRAPPERS[name]
    model, tokens = random_wrapper(name, kind), some_tokens(NUM_TOKENS)
    directory = write_directory(tmp_path, model)
    tensors = load_file(directory / "model.safetensors")
    layer = "mtp.layers.0."
    if architecture == "GlmOcr":
        layer = f"model.language_model.layers.{model.config.text_config.num_hidden_layers}."
    else:
        tensors["mtp.fc.weight"] = torch.randn(8, 16)
    tensors[layer + "self_attn.q_proj.weight"] = torch.randn(8, 8)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    check(directory, logits_of(model, tokens), tokens)
