"""Every model family against transformers: tiny random checkpoints, with the options of the
family's config toggled, give the same logits however the work is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import write_directory
from tests.support.eager import (
    BLOCK_TOKENS,
    CPU,
    EagerStepper,
    assert_same,
    expected,
    load,
    some_tokens,
)
from tests.support.family_models import (
    BIASED,
    CASES,
    FULL,
    MODEL_TYPES,
    OWN_SIZES,
    VARIANTS,
    WINDOW,
    random_model,
)
from tests.support.kernels import native_kernels
from worker.attention.reference import ReferenceAttention
from worker.attention.select import select_attention
from worker.errors import UnusableModel
from worker.loading.decoder import load_model
from worker.loading.header import ModelHeader, read_header
from worker.models.compiled import why_not
from worker.spec.families.family import UNLIMITED_CONTEXT
from worker.spec.model_spec import ModelSpec
from worker.startup.memory_plan import PlannedModel, weights_bytes

NUM_TOKENS = 61
NOISE = {"gemma2": 1.5e-4}
"""Tolerances of models whose rounding errors in float32 alone come near 1e-4: the largest error of
one order of sums was 1.0e-4, and that of another 1.3e-4. Their mean was the same."""


def test_every_family_has_variants() -> None:
    assert VARIANTS.keys() == set(MODEL_TYPES)


@pytest.mark.parametrize(
    ("model_type", "variant", "changes"), CASES, ids=[f"{a} {b}" for a, b, _ in CASES]
)
def test_logits_are_those_of_transformers_whole_in_chunks_and_token_by_token(
    tmp_path: Path, model_type: str, variant: str, changes: dict[str, Any]
) -> None:
    """The single tokens of variants are six on both sides of a multiple of 32: more than a short
    convolution keeps, and the end of an attention chunk is among them. The plain model of a family
    also has the last third of its tokens one by one."""
    theirs, tokens = random_model(model_type, **changes), some_tokens(NUM_TOKENS)
    loaded = load(write_directory(tmp_path, theirs))
    logits = expected(theirs, tokens)
    atol = NOISE.get(model_type, 1e-4) * max(1.0, float(logits.abs().max()) / 10)
    cuts = [[(61,)], [(7,), (1,), (20,), *[(1,)] * 6, (27,)]]
    if variant == "plain":
        cuts.append([(40,), *[(1,)] * 21])
    for steps in cuts:
        assert_same(EagerStepper(loaded, [tokens]).run(steps)[0], logits, atol)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_requests_in_one_batch_do_not_see_each_other(tmp_path: Path, model_type: str) -> None:
    theirs = random_model(model_type)
    requests = [some_tokens(count, seed=count) for count in (50, 9, 33)]
    stepper = EagerStepper(load(write_directory(tmp_path, theirs)), requests)
    steps = [(20, 8, 0), (1, 1, 30), (28, 0, 1), (1, 0, 1), (0, 0, 1)]
    for ours, tokens in zip(stepper.run(steps), requests, strict=True):
        logits = expected(theirs, tokens)
        assert_same(ours, logits, 1e-4 * max(1.0, float(logits.abs().max()) / 10))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_weights_take_the_memory_that_is_planned(tmp_path: Path, model_type: str) -> None:
    path = write_directory(tmp_path, random_model(model_type))
    header, loaded = read_header(path), load(path)
    assert isinstance(header, ModelHeader)
    planned = PlannedModel(header.name, header.tensors, header.kinds, is_packed=False)
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in loaded.model.tensors()}
    assert weights_bytes(planned, "float32") == sum(sizes.values())


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "smollm3": [{"use_sliding_window": True, **WINDOW}],
    "mistral": [WINDOW],
    "ministral": [WINDOW],
    "mixtral": [WINDOW],
    "qwen2": [{"use_sliding_window": True, "max_window_layers": 2, **WINDOW}],
    "gemma": [{"initializer_range": 0.05}],
    "gemma2": [{"initializer_range": 0.06}],
    "gemma3_text": [{"sliding_window_pattern": 2}],
    "qwen3_moe": [
        {"moe_intermediate_size": 64},
        {"moe_intermediate_size": 64, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ],
    "qwen2_moe": [{"moe_intermediate_size": 64}],
    "qwen3_next": [{"initializer_range": 0.03, "moe_intermediate_size": 64}],
    "qwen3_5_text": [{"initializer_range": 0.03}],
    "qwen3_5_moe_text": [{"initializer_range": 0.03, "moe_intermediate_size": 64}],
    "lfm2": [{}, {"conv_bias": True}, {"layer_types": ["full_attention"] * 4}],
    "lfm2_moe": [{"moe_intermediate_size": 64}],
    "nemotron_h": [{}, {"moe_latent_size": 64}, {"layers_block_type": [FULL, "mlp"] * 3}],
    "falcon_h1": [{}, {"mamba_rms_norm": True, "mamba_norm_before_gate": False}],
    "mistral4": [{"initializer_range": 0.06}],
    "deepseek_v32": [{"index_topk": 7}],  # with 8, two scores at the limit are nearly equal
    "phi3": [{}, {"partial_rotary_factor": 0.5}],
    "olmo3": [WINDOW],
    "olmo_hybrid": [
        {"initializer_range": 0.05},
        {"initializer_range": 0.05, "linear_allow_neg_eigval": False},
    ],
    "exaone4": [WINDOW],
    "gpt2": [{}, {"activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True}],
    "gpt_neox": [{}, {"use_parallel_residual": False}],
    "starcoder2": [WINDOW],
    "stablelm": [{"use_qkv_bias": True}, {"use_parallel_residual": True}],
    "cohere2": [WINDOW | BIASED],
}
"""Model type -> changes of its config that are tested on the compiled kernels. Other model types
are tested without changes."""
COMPILED_CASES = [
    (model_type, changes) for model_type in MODEL_TYPES for changes in OPTIONS.get(model_type, [{}])
]


@pytest.mark.parametrize(("model_type", "changes"), COMPILED_CASES, ids=str)
def test_the_compiled_kernels_give_the_same_logits(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    """The weights are smaller than in the tests above, because the model is wider. With weights as
    large as there, float32 logits of transformers itself are up to 4e-4 from those in float64."""
    sizes = {"hidden_size": 192, "initializer_range": 0.1} | changes
    if "head_dim" in OWN_SIZES.get(model_type, {}):
        sizes["head_dim"] = 32
    theirs, tokens = random_model(model_type, **sizes), some_tokens(300)
    path, kernels = write_directory(tmp_path, theirs), native_kernels()
    loaded = load_model(path, dtype=torch.float32, device=CPU, kernels=kernels, weights="packed")
    assert isinstance(loaded.spec, ModelSpec)
    assert (loaded.model.whole is None) == bool(why_not(loaded.spec))
    attention = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=loaded.model.kernels)
    logits = expected(theirs, tokens)
    atol = 1e-4 * max(1.0, float(logits.abs().max()) / 10)
    for steps in [(300,)], [(7,), (1,), (260,), (12,), *[(1,)] * 20]:
        assert_same(EagerStepper(loaded, [tokens], attention).run(steps)[0], logits, atol)


def test_a_score_far_above_its_cap_is_as_large_as_the_cap(tmp_path: Path) -> None:
    """The kernels compute tanh(score / cap) from e^(2 score / cap), whose exact value would be
    infinite here."""
    changes = {"query_pre_attn_scalar": 1, "attn_logit_softcapping": 2.5, "initializer_range": 0.5}
    theirs, tokens = random_model("gemma2", hidden_size=192, **changes), some_tokens(100)
    path, kernels = write_directory(tmp_path, theirs), native_kernels()
    loaded = load_model(path, dtype=torch.float32, device=CPU, kernels=kernels, weights="packed")
    attention = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=loaded.model.kernels)
    logits = expected(theirs, tokens)
    atol = 1e-3 * float(logits.abs().max())
    assert_same(EagerStepper(loaded, [tokens], attention).run([(99,), (1,)])[0], logits, atol)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3", "cohere2"])
def test_the_reference_attention_gives_the_same_logits(tmp_path: Path, model_type: str) -> None:
    theirs, tokens = random_model(model_type, sliding_window=16), some_tokens(40)
    stepper = EagerStepper(load(write_directory(tmp_path, theirs)), [tokens], ReferenceAttention())
    assert_same(stepper.run([(25,), (1,), (14,)])[0], expected(theirs, tokens), 1e-3)


PUBLISHED_EXAONE4: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "32B": (
        {"sliding_window": 24, "sliding_window_pattern": 4},
        {"sliding_window_pattern": "LLLG"},
    ),
    "1.2B": (
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
        {"sliding_window_pattern": None},
    ),
}
"""Model -> (config, other values of keys in its published config.json)."""


@pytest.mark.parametrize("name", PUBLISHED_EXAONE4)
def test_the_published_configs_of_exaone_4_are_read(tmp_path: Path, name: str) -> None:
    changes, published = PUBLISHED_EXAONE4[name]
    theirs, tokens = random_model("exaone4", **changes), some_tokens(61)
    file = write_directory(tmp_path, theirs) / "config.json"
    written = json.loads(file.read_text())
    assert "layer_types" in written
    file.write_text(json.dumps(written | published))
    logits = expected(theirs, tokens)
    ours = EagerStepper(load(tmp_path), [tokens]).run([(61,)])[0]
    assert_same(ours, logits, 1e-4 * max(1.0, float(logits.abs().max()) / 10))


def test_the_published_config_of_lfm2_is_read(tmp_path: Path) -> None:
    """It has keys of its own, which replace those of other models if it has both."""
    theirs = random_model("lfm2", layer_types=None, full_attn_idxs=[1, 2])
    file = write_directory(tmp_path, theirs) / "config.json"
    written = json.loads(file.read_text())
    assert written["tie_word_embeddings"]
    del written["layer_types"], written["rope_parameters"]
    published = {
        "full_attn_idxs": [1, 2],
        "block_ff_dim": written["intermediate_size"],
        "intermediate_size": 48,
        "tie_embedding": True,
        "tie_word_embeddings": False,
        "rope_theta": 1e6,
        "block_use_swiglu": True,
        "conv_dim": 96,
    }
    file.write_text(json.dumps(written | published))
    tokens = some_tokens(61)
    logits = expected(theirs, tokens)
    ours = EagerStepper(load(tmp_path), [tokens]).run([(61,)])[0]
    assert_same(ours, logits, 1e-4 * max(1.0, float(logits.abs().max()) / 10))
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_same(expected(again, tokens), logits)


def test_the_published_config_of_nemotron_h_is_read(tmp_path: Path) -> None:
    """It has a pattern of letters, and lists what only the first values of the weights depend on.
    Files have one of two prefixes."""
    theirs, tokens = random_model("nemotron_h"), some_tokens(61)
    file = write_directory(tmp_path, theirs) / "config.json"
    written = json.loads(file.read_text())
    del written["layers_block_type"], written["time_step_limit"]
    published = {
        "hybrid_override_pattern": "M-*EME",
        "num_hidden_layers": 6,
        "time_step_limit": [0.0, float("inf")],
        "time_step_min": 0.6,
        "attention_head_dim": 32,
        "rope_theta": 10000,
    }
    file.write_text(json.dumps(written | published))
    logits = expected(theirs, tokens)
    assert_same(EagerStepper(load(tmp_path), [tokens]).run([(61,)])[0], logits)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("backbone.", "model."): each for name, each in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert_same(EagerStepper(load(tmp_path), [tokens]).run([(61,)])[0], logits)


def test_the_published_config_of_recurrent_gemma_is_read(tmp_path: Path) -> None:
    """It has rotary embeddings at the top level, and no longest context."""
    theirs, tokens = random_model("recurrent_gemma"), some_tokens(61)
    file = write_directory(tmp_path, theirs) / "config.json"
    written = json.loads(file.read_text())
    del written["rope_parameters"], written["max_position_embeddings"]
    published = {
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "embeddings_scale_by_sqrt_dim": True,
    }
    file.write_text(json.dumps(written | published))
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    logits, loaded = expected(again, tokens), load(tmp_path)
    assert (logits - expected(theirs, tokens)).abs().max() > 0.01  # the base is another one
    assert_same(EagerStepper(loaded, [tokens]).run([(61,)])[0], logits)
    assert loaded.spec.context_tokens == UNLIMITED_CONTEXT


@pytest.mark.parametrize("convolutions", ["one", "of equal sizes", "of queries, keys and values"])
@pytest.mark.parametrize("norms", ["the same", "other in all layers", "other with delta nets"])
def test_all_names_of_the_tensors_of_olmo_hybrid_are_found(
    tmp_path: Path, norms: str, convolutions: str
) -> None:
    """Versions of transformers have written several names, and have cut the convolution in two
    ways."""
    theirs, tokens = random_model("olmo_hybrid"), some_tokens(61)
    file = write_directory(tmp_path, theirs) / "model.safetensors"
    weights = theirs.state_dict()
    for index, kind in enumerate(theirs.config.layer_types):
        layer = f"model.layers.{index}."
        if kind == "linear_attention" and convolutions != "one":
            conv = weights.pop(layer + "linear_attn.conv1d.weight")
            sizes = [24, 24, 120] if "keys" in convolutions else [56] * 3
            for part, rows in zip("qkv", conv.split(sizes), strict=True):
                weights[f"{layer}linear_attn.{part}_conv1d.weight"] = rows.contiguous()
        if norms == "other in all layers" or (kind, norms[:5]) == ("linear_attention", "other"):
            for old, new in [
                ("input_layernorm", "attention_layer_norm"),
                ("post_attention_layernorm", "feedforward_layer_norm"),
            ]:
                if (norm := weights.pop(f"{layer}{old}.weight", None)) is not None:
                    weights[f"{layer}{new}.weight"] = norm
    save_file(weights | {"mtp.norm.weight": torch.ones(96)}, file)
    assert_same(EagerStepper(load(tmp_path), [tokens]).run([(61,)])[0], expected(theirs, tokens))


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "mamba2"])
def test_bfloat16_with_a_float32_sum_is_as_exact_as_in_transformers(
    tmp_path: Path, model_type: str
) -> None:
    theirs, tokens = random_model(model_type, residual_in_fp32=True), some_tokens(61)
    path, exact = write_directory(tmp_path, theirs), expected(theirs, tokens)
    loaded = load_model(path, dtype=torch.bfloat16, device=CPU)
    attention = select_attention(BLOCK_TOKENS, dtype=torch.bfloat16)
    ours = EagerStepper(loaded, [tokens], attention).run([(61,)])[0]
    rounded = expected(theirs.to(torch.bfloat16), tokens).float()
    assert (ours - exact).norm() <= 1.2 * (rounded - exact).norm()


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("glm4_moe", "model.layers.4.eh_proj.weight"),
        ("ernie4_5_moe", "model.mtp_linear_proj.0.weight"),
        ("minimax_m2", "model.layers.4.mtp.weight"),
    ],
)
def test_tensors_for_drafts_are_not_used(tmp_path: Path, model_type: str, name: str) -> None:
    theirs, tokens = random_model(model_type), some_tokens(20)
    file = write_directory(tmp_path, theirs) / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(96)}, file)
    assert_same(EagerStepper(load(tmp_path), [tokens]).run([(20,)])[0], expected(theirs, tokens))


def test_without_a_base_olmo_hybrid_rotates_nothing(tmp_path: Path) -> None:
    """The base is null in the rope parameters, or, if they have none, at the top level."""
    theirs, tokens = random_model("olmo_hybrid", rope_theta=None), some_tokens(20)
    file = write_directory(tmp_path, theirs) / "config.json"
    written = json.loads(file.read_text())
    logits = expected(theirs, tokens)
    for changes in [{}, {"rope_parameters": None, "rope_theta": None}]:
        file.write_text(json.dumps(written | changes))
        again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert_same(expected(again, tokens), logits)
        assert_same(EagerStepper(load(tmp_path), [tokens]).run([(20,)])[0], logits)


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "olmo_hybrid"],
)
def test_a_hybrid_with_another_activation_is_refused(model_type: str, tmp_path: Path) -> None:
    """It would be that of the convolutions too."""
    write_directory(tmp_path, random_model(model_type, hidden_act="gelu"))
    with pytest.raises(UnusableModel, match=f"hidden_act 'gelu' is not supported for {model_type}"):
        load(tmp_path)


def test_tensors_without_the_prefix_of_the_base_model_are_found(tmp_path: Path) -> None:
    """The files of the first GPT-2 have such tensors."""
    theirs, tokens = random_model("gpt2"), some_tokens(20)
    write_directory(tmp_path, theirs.transformer)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["GPT2LMHeadModel"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same(EagerStepper(load(tmp_path), [tokens]).run([(20,)])[0], expected(theirs, tokens))
