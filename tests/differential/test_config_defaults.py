"""Each key of config.json, missing, null or set, has the same meaning as in transformers.

The tests compare the config and the logits. A config that transformers cannot read is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.support.checkpoints import VOCAB, tiny_tokenizer
from tests.support.eager import EagerStepper, assert_same, expected, load, some_tokens
from worker.errors import UnusableModel
from worker.layers.rope import attention_factor, inverse_frequencies
from worker.spec.facts import KVHeads
from worker.spec.families.family import ModelFamily
from worker.spec.families.registry import FAMILIES, find_family
from worker.spec.model_spec import ModelSpec
from worker.spec.rope_config import LinearScaling, RopeConfig

MISSING: Any = object()
NUM_TOKENS = 40
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-2,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
TRIED = [family for family in FAMILIES if family.architecture in (LLAMA, MISTRAL)]
"""Families of which every key is tried. Of the others, this file compares the defaults, and
test_families.py tests the options."""
MODEL_TYPES = {family.architecture: family.model_type for family in TRIED}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

SET: dict[str, list[Any]] = {
    "vocab_size": [VOCAB - 1],
    "hidden_size": [32],
    "intermediate_size": [96],
    "num_hidden_layers": [1],
    "num_attention_heads": [4],
    "num_key_value_heads": [2, 8],
    "head_dim": [8],
    "hidden_act": ["silu", "swish"],
    "max_position_embeddings": [64],
    "rms_norm_eps": [1e-5],
    "rope_theta": [500.0],
    "rope_parameters": [
        {},
        {"rope_theta": 500.0, "rope_type": "default"},
        {"rope_type": "default"},
        {"type": "linear", "factor": 4.0},
        {"rope_type": "default", "type": "linear", "factor": 4.0},
        {"rope_type": None, "type": "linear", "factor": 4.0},
        LLAMA3,
        YARN,
    ],
    "rope_scaling": [{}, {"type": "linear", "factor": 4.0}, {**LINEAR, "rope_theta": 500.0}],
    "eos_token_id": [5, [5, 6]],
    "tie_word_embeddings": [True, False],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "sliding_window": [16, 4096],
    "original_max_position_embeddings": [128],
    "partial_rotary_factor": [1.0],
    "architectures": [],
}
"""Key -> values that are tried besides missing and null."""
ROPE_SET: dict[str, dict[str, list[Any]]] = {
    "linear": {"rope_theta": [500.0], "factor": [2.0]},
    "llama3": {
        "rope_theta": [500.0],
        "factor": [2.0],
        "low_freq_factor": [2.0, 4.0],
        "high_freq_factor": [8.0],
        "original_max_position_embeddings": [128],
    },
    "yarn": {
        "rope_theta": [500.0],
        "factor": [2.0],
        "original_max_position_embeddings": [128],
        "attention_factor": [1.5, 0.0],
        "beta_fast": [16.0, 0.0],
        "beta_slow": [4.0, 0.0],
        "truncate": [True, False],
        "mscale": [0.7],
        "mscale_all_dim": [0.7],
    },
}
"""Type of rotary embedding -> parameter -> values that are tried besides missing and null."""

COMPUTED = {
    *("rope_theta", "head_dim", "sliding_window_pattern", "partial_rotary_factor"),
    *("global_head_dim", "num_global_key_value_heads", "per_layer_config"),
    "hybrid_override_pattern",
}
"""Keys that not every config class has as an attribute, because its constructor computes or
renames them."""


@dataclass(frozen=True)
class DefaultCase:
    architecture: str
    changes: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        whole: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": MODEL_TYPES[self.architecture],
        }
        whole |= BASE | self.changes
        return {key: value for key, value in whole.items() if value is not MISSING}

    def __str__(self) -> str:
        words = [
            f"{key} {'missing' if value is MISSING else json.dumps(value)}"
            for key, value in self.changes.items()
        ]
        return " ".join([self.architecture.removesuffix("ForCausalLM"), *words])


def top_level_cases() -> list[DefaultCase]:
    return [
        DefaultCase(architecture, {key: value})
        for architecture in MODEL_TYPES
        for key, values in SET.items()
        for value in [MISSING, None, *values]
    ]


def rope_cases() -> list[DefaultCase]:
    cases = []
    for base in (LINEAR, LLAMA3, YARN):
        for key, values in ROPE_SET[base["rope_type"]].items():
            for value in [MISSING, None, *values]:
                rope = {k: v for k, v in (base | {key: value}).items() if v is not MISSING}
                cases.append(DefaultCase(LLAMA, {"rope_parameters": rope}))
    return cases


COMBINED: list[dict[str, Any]] = [
    {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "rope_scaling": LINEAR},
    {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "rope_scaling": YARN},
    {"rope_parameters": LLAMA3, "rope_scaling": {**LINEAR, "rope_theta": 700.0}},
    {"rope_parameters": LLAMA3, "rope_scaling": LINEAR, "rope_theta": 700.0},
    {"rope_parameters": LLAMA3, "rope_scaling": {}},
    {"rope_parameters": LLAMA3, "rope_theta": 700.0},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
    {"rope_scaling": YARN, "original_max_position_embeddings": 128},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": 128},
    {"rope_scaling": YARN, "original_max_position_embeddings": None},
    {"rope_scaling": LINEAR, "original_max_position_embeddings": None},
    {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    {"rope_parameters": {**YARN, "factor": None, "mscale": 0.7, "mscale_all_dim": 0.4}},
    {"rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 4.0}},
    {"rope_parameters": {**YARN, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False}},
    {"rope_parameters": {**LINEAR, "partial_rotary_factor": 1.0}, "rope_theta": None},
    {"rope_parameters": {**LINEAR, "rope_theta": 500.0}, "rope_theta": None},
]


def cases() -> list[DefaultCase]:
    combined = [DefaultCase(each, changes) for each in MODEL_TYPES for changes in COMBINED]
    return [*top_level_cases(), *rope_cases(), *combined]


def test_every_key_that_is_read_is_tried() -> None:
    for family in TRIED:
        assert {*family.defaults, *family.ignored} <= SET.keys()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_the_defaults_are_those_of_the_config_class(family: ModelFamily) -> None:
    """Attributes of the config class are compared, because an instance replaces some defaults by
    values that it derives from other keys."""
    theirs = AutoConfig.for_model(family.model_type)
    names = {key: other for other, key in family.aliases.items()}
    for key, ours in family.defaults.items():
        default = getattr(type(theirs), key, getattr(type(theirs), names.get(key, key), MISSING))
        is_computed = key in COMPUTED and (default is MISSING or isinstance(default, property))
        assert default == ours or is_computed, key


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_an_empty_config_means_what_transformers_writes_for_it(family: ModelFamily) -> None:
    """This covers the defaults that transformers derives from other keys."""
    names = {"architectures": [family.architecture], "model_type": family.model_type}
    names |= family.needed
    theirs = AutoConfig.for_model(family.model_type, **family.needed)
    written = json.loads(theirs.to_json_string(use_diff=False))
    assert family.spec(names) == family.spec(written | names)


def checkpoint(path: Path, case: DefaultCase) -> tuple[Path, Any]:
    """Write a checkpoint with this config, and return the path and the model of transformers.

    If transformers cannot use the config, its exception is raised.
    """
    (path / "config.json").write_text(json.dumps(case.config))
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        if name.endswith("bias"):
            tensor.normal_(0, 0.3)
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def spec_of(case: DefaultCase) -> ModelSpec:
    return find_family(case.config).spec(case.config)


def ends_of(theirs: Any) -> list[int]:
    eos: int | list[int] | None = theirs.generation_config.eos_token_id
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def assert_same_config(ours: ModelSpec, theirs: PretrainedConfig) -> None:
    layer = ours.layers[0]
    rope = layer.attention.rope
    assert rope is not None
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden == theirs.hidden_size
    assert layer.mlp.intermediate == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert layer.attention.num_heads == theirs.num_attention_heads
    assert ours.layer_heads[0] == KVHeads(theirs.num_key_value_heads, theirs.head_dim)
    assert ours.norm.eps == theirs.rms_norm_eps
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.context_tokens == theirs.max_position_embeddings
    assert rope.theta == theirs.rope_parameters["rope_theta"]
    window = theirs.sliding_window if theirs.model_type == "mistral" else None
    assert ours.windows == {window}


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_key_has_the_same_meaning_as_in_transformers(tmp_path: Path, case: DefaultCase) -> None:
    try:
        path, theirs = checkpoint(tmp_path, case)
        logits = expected(theirs, tokens := some_tokens(NUM_TOKENS, vocab=theirs.vocab_size))
    except Exception:  # transformers raises many types
        with pytest.raises(UnusableModel):
            spec_of(case)
        return
    ours = load(path)
    assert isinstance(ours.spec, ModelSpec)
    assert_same_config(ours.spec, theirs.config)
    rope, rotary = ours.spec.layers[0].attention.rope, theirs.model.rotary_emb
    assert rope is not None
    torch.testing.assert_close(inverse_frequencies(rope), rotary.inv_freq)
    assert attention_factor(rope) == pytest.approx(rotary.attention_scaling)
    assert ours.card.eos_token_ids == ends_of(theirs)
    count = min(NUM_TOKENS, ours.card.context_tokens)
    # Wide models sum up more rounding errors, in an order that depends on the number of threads.
    scale = max(1.0, float(logits.abs().max()) / 10)
    assert_same(
        EagerStepper(ours, [tokens[:count]]).run([(count,)])[0], logits[:count], 1e-4 * scale
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": None}}, "'partial_rotary_factor' is null"),
        ({"rope_parameters": {"full_attention": LINEAR}}, "must be the same in all layers"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}},
            "must not be below low_freq_factor",
        ),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ],
    ids=str,
)
def test_a_config_field_that_changes_the_result_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnusableModel, match=message):
        spec_of(DefaultCase(LLAMA, changes))


@pytest.mark.parametrize(("theta", "warnings"), [(500.0, 1), (1e4, 0)])
def test_a_warning_is_logged_if_rope_scaling_drops_the_theta(
    theta: float, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    spec = spec_of(DefaultCase(LLAMA, rope | {"rope_scaling": LINEAR}))
    assert spec.layers[0].attention.rope == RopeConfig(16, 1e4, LinearScaling(4.0))
    assert len(caplog.records) == warnings


def test_a_window_changes_the_answer(tmp_path: Path) -> None:
    """So the tests above would notice a window that is ignored."""
    path, theirs = checkpoint(tmp_path, DefaultCase(MISTRAL, {"sliding_window": 16}))
    plain = json.loads((path / "config.json").read_text()) | {"sliding_window": None}
    (path / "config.json").write_text(json.dumps(plain))
    ours, tokens = load(path), some_tokens(17)
    logits = EagerStepper(ours, [tokens]).run([(17,)])[0]
    assert_same(logits[:16], expected(theirs, tokens)[:16])
    assert (logits[16] - expected(theirs, tokens)[16]).abs().max() > 0.01


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_head_that_differs_from_tied_embeddings_is_used(tmp_path: Path, is_copy: bool) -> None:
    path, theirs = checkpoint(tmp_path, DefaultCase(LLAMA, {"tie_word_embeddings": True}))
    weights = dict(theirs.state_dict())
    head = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"] = head if is_copy else head.flip(0)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    theirs, tokens = AutoModelForCausalLM.from_pretrained(path).eval(), some_tokens(20)
    ours = load(path)
    assert ours.spec.tied_embeddings == is_copy
    assert_same(EagerStepper(ours, [tokens]).run([(20,)])[0], expected(theirs, tokens))
