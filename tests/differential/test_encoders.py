"""Every family of encoders gives the vectors and scores that transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import MPNetTokenizer, PreTrainedModel

from gateway.text.inputs import InputTokenizer
from protocol.engine.encoding import Pooling
from tests.support.encoder_models import (
    SCORERS,
    VARIANTS,
    encode_inputs,
    hidden_states,
    pooled,
    random_encoder,
    some_inputs,
    write_encoder,
    write_modules,
)
from worker.encoders.header import EncoderHeader
from worker.encoders.runner import EncoderModel, EncodeRunner
from worker.encoders.spec import QUERY_TILE
from worker.loading.encoder import load_encoder
from worker.loading.header import encoder_header

CPU = torch.device("cpu")
LENGTHS = [5, 1, 2, 130, 9, 33, 8, 1, 300, 31]
TOLERANCE = 1e-4


def header_of(path: Path) -> EncoderHeader:
    header = encoder_header(path)
    assert header is not None
    return header


def runner_of(path: Path) -> EncodeRunner:
    loaded = load_encoder(header_of(path), dtype=torch.float32, device=CPU)
    return EncodeRunner(EncoderModel(loaded.model, loaded.vectors))


@torch.inference_mode()
def vectors(
    runner: EncodeRunner, inputs: list[list[int]], splits: list[int] | None = None
) -> Tensor:
    return runner.encode(encode_inputs(inputs, splits))


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) < TOLERANCE


ALL = [(kind, name) for kind, variants in VARIANTS.items() for name in variants]
ALL_SCORERS = [(kind, name) for kind, variants in SCORERS.items() for name in variants]


@pytest.mark.parametrize(("kind", "name"), ALL)
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_vectors_equal_those_of_transformers(
    kind: str, name: str, pooling: Pooling, tmp_path: Path
) -> None:
    model = random_encoder(kind, **VARIANTS[kind][name])
    write_modules(write_encoder(tmp_path, model), pooling)
    inputs = some_inputs(LENGTHS)
    wanted = torch.stack([pooled(hidden_states(model, ids), pooling) for ids in inputs])
    assert_close(vectors(runner_of(tmp_path), inputs), wanted)


@pytest.mark.parametrize(("kind", "name"), ALL_SCORERS)
def test_scores_equal_those_of_transformers(kind: str, name: str, tmp_path: Path) -> None:
    changes = SCORERS[kind][name]
    model = random_encoder(kind, scores=True, **changes)
    write_encoder(tmp_path, model)
    inputs = some_inputs(LENGTHS)
    with torch.no_grad():
        logits = torch.stack([model(torch.tensor([ids])).logits[0] for ids in inputs])
    wanted = logits if "no sigmoid" in name else logits.sigmoid()
    assert_close(vectors(runner_of(tmp_path), inputs), wanted)


NOMIC = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}


def published_nomic(path: Path, **fields: Any) -> PreTrainedModel:
    """Write a model of Nomic's BERT with the keys of its published configs. Return the model."""
    rope = {"rope_type": "default", "rope_theta": 100.0}
    model = random_encoder("nomic_bert", rope_parameters=rope)
    write_modules(write_encoder(path, model), "mean")
    config = json.loads((path / "config.json").read_text())
    own = {name: config[key] for name, key in NOMIC.items()}
    own |= {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "activation_function": "swiglu",
        "rotary_emb_base": 100,
        "rotary_emb_fraction": 1.0,
        "rotary_scaling_factor": None,
        "vocab_size": config["vocab_size"],
        "type_vocab_size": 2,
        "qkv_proj_bias": False,
        "prenorm": False,
    }
    (path / "config.json").write_text(json.dumps(own | fields))
    return model


def test_a_published_config_of_nomics_bert_is_read(tmp_path: Path) -> None:
    model = published_nomic(tmp_path)
    inputs = some_inputs(LENGTHS)
    wanted = torch.stack([pooled(hidden_states(model, ids), "mean") for ids in inputs])
    assert_close(vectors(runner_of(tmp_path), inputs), wanted)
    assert header_of(tmp_path).encoding.max_tokens == 320


def test_inputs_beyond_the_training_are_refused_if_they_would_be_scaled(tmp_path: Path) -> None:
    published_nomic(tmp_path, rotary_scaling_factor=2, max_trained_positions=200)
    assert header_of(tmp_path).encoding.max_tokens == 200
    published_nomic(tmp_path, rotary_scaling_factor=2, n_positions=8192)
    assert header_of(tmp_path).encoding.max_tokens == 2048
    published_nomic(tmp_path, n_positions=8192)
    assert header_of(tmp_path).encoding.max_tokens == 8192


def test_learned_biases_reach_across_tiles_of_queries(tmp_path: Path) -> None:
    model = random_encoder("mpnet", **VARIANTS["mpnet"]["a long table"])
    write_modules(write_encoder(tmp_path, model), "mean")
    lengths = [2 * QUERY_TILE + 6, QUERY_TILE + 1, QUERY_TILE + 90, QUERY_TILE]
    inputs = some_inputs(lengths)
    wanted = torch.stack([pooled(hidden_states(model, ids), "mean") for ids in inputs])
    assert_close(vectors(runner_of(tmp_path), inputs), wanted)


def test_the_tokenizer_of_an_mpnet_puts_its_own_special_tokens_around_texts(tmp_path: Path) -> None:
    words = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "<mask>", "the", "sea", "har", "##bour"]
    theirs = MPNetTokenizer(vocab={word: place for place, word in enumerate(words)})
    model = random_encoder("mpnet", num_labels=1, scores=True)
    write_encoder(tmp_path, model)
    theirs.save_pretrained(tmp_path)
    text = header_of(tmp_path).text
    ours = InputTokenizer(Tokenizer.from_buffer(text.tokenizer), 320, 1 << 16)
    pairs = [("The sea", "harbour"), ("harbour", "sea"), ("<mask>", "the The")]
    found = ours.encode(pairs, ["text"] * 3, offload=lambda work: work())
    assert [each.ids for each in found] == [theirs(*pair)["input_ids"] for pair in pairs]
    assert found[0].ids == [0, 6, 7, 2, 2, 8, 9, 2]
    with torch.no_grad():
        wanted = [model(torch.tensor([each.ids])).logits[0].sigmoid() for each in found]
    ids, splits = [each.ids for each in found], [each.split for each in found]
    assert_close(vectors(runner_of(tmp_path), ids, splits), torch.stack(wanted))


@pytest.mark.parametrize("kind", ["bert", "nomic_bert"])
def test_the_second_text_of_a_pair_has_another_token_type(kind: str, tmp_path: Path) -> None:
    model = random_encoder(kind)
    write_modules(write_encoder(tmp_path, model), "mean")
    inputs, splits = some_inputs([9, 4, 9, 30]), [3, 4, 0, 17]
    wanted = torch.stack(
        [
            pooled(hidden_states(model, ids, split), "mean")
            for ids, split in zip(inputs, splits, strict=True)
        ]
    )
    assert_close(vectors(runner_of(tmp_path), inputs, splits), wanted)


def test_a_model_with_one_token_type_gives_it_to_both_texts_of_a_pair(tmp_path: Path) -> None:
    write_modules(write_encoder(tmp_path, random_encoder("bert", type_vocab_size=1)), "mean")
    runner, inputs = runner_of(tmp_path), some_inputs([9, 4])
    assert_close(vectors(runner, inputs, [3, 4]), vectors(runner, inputs))


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_result_does_not_depend_on_the_other_inputs_of_its_step(
    kind: str, tmp_path: Path
) -> None:
    model = random_encoder(kind, **VARIANTS[kind]["plain"])
    write_modules(write_encoder(tmp_path, model), "mean")
    runner, inputs = runner_of(tmp_path), some_inputs(LENGTHS)
    together = vectors(runner, inputs)
    alone = torch.cat([vectors(runner, [ids]) for ids in inputs])
    assert float((together - alone).abs().max()) < 1e-5
    order = [3, 0, 9, 1, 2, 8, 7, 4, 6, 5]
    shuffled = vectors(runner, [inputs[place] for place in order])
    assert float((shuffled - together[order]).abs().max()) < 1e-5


def test_a_dense_module_is_applied_before_the_vector_is_normalised(tmp_path: Path) -> None:
    model = random_encoder("bert")
    write_modules(write_encoder(tmp_path, model), "mean", dense=True)
    inputs = some_inputs([4, 11])
    from safetensors.torch import load_file

    dense = load_file(tmp_path / "2_Dense" / "model.safetensors")
    means = torch.stack([hidden_states(model, ids).mean(0) for ids in inputs])
    wanted = torch.tanh(means @ dense["linear.weight"].T + dense["linear.bias"])
    wanted = torch.nn.functional.normalize(wanted, dim=-1)
    assert_close(vectors(runner_of(tmp_path), inputs), wanted)
    assert header_of(tmp_path).encoding.size == 20


def test_vectors_without_a_normalize_module_keep_their_length(tmp_path: Path) -> None:
    model = random_encoder("bert")
    write_modules(write_encoder(tmp_path, model), "cls", normalizes=False)
    inputs = some_inputs([4, 11])
    wanted = torch.stack([hidden_states(model, ids)[0] for ids in inputs])
    assert_close(vectors(runner_of(tmp_path), inputs), wanted)


def test_an_encoder_without_module_files_has_means_of_length_one(tmp_path: Path) -> None:
    model = random_encoder("bert")
    write_encoder(tmp_path, model)
    inputs = some_inputs([4, 11])
    wanted = torch.stack([pooled(hidden_states(model, ids), "mean") for ids in inputs])
    assert_close(vectors(runner_of(tmp_path), inputs), wanted)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *[("bert", {}), ("xlm-roberta", {"type_vocab_size": 1}), ("modernbert", {})],
        *[("mpnet", {}), ("nomic_bert", {})],
    ],
)
def test_the_head_of_a_masked_language_model_is_ignored(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForMaskedLM

    plain = random_encoder(kind, **(VARIANTS[kind]["plain"] | changes))
    model = AutoModelForMaskedLM.from_config(plain.config).eval()
    model.base_model.load_state_dict(plain.state_dict(), strict=False)
    write_encoder(tmp_path, model)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0].endswith(
        "MaskedLM"
    )
    inputs = some_inputs([4, 11])
    wanted = torch.stack([pooled(hidden_states(plain, ids), "mean") for ids in inputs])
    assert_close(vectors(runner_of(tmp_path), inputs), wanted)
