"""`tidegate quantize` without a model: K-quants, types of tensors, tokenizers, and the command."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from tokenizers import Tokenizer

from protocol.engine.model_card import SamplingDefaults
from protocol.process.exit_codes import ExitCode
from protocol.shared.gguf_parts import MAGIC
from tests.support.checkpoints import SPECIAL, random_llama, tiny_tokenizer, write_directory
from tests.support.gguf_tokenizers import TEXTS, assert_same
from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.waiting import eventually
from tools.commands import quantize as command
from tools.failure import Failure
from worker.checkpoint.gguf_tokenizer import QWEN2, gguf_text
from worker.checkpoint.gguf_tokens import SPACE
from worker.checkpoint.text import TextFacts
from worker.errors import UnusableModel
from worker.quantize.tokens import tokenizer_metadata
from worker.quantize.types import has_more_bits, quantize, tensor_kind
from worker.spec.fields import Fields

# ---- K-quants


def error(values: np.ndarray[Any, Any], kind: Kind) -> float:
    """Return the root mean square error of `values` after quantisation to `kind`."""
    (back,) = quants.dequantize(quantize(values, kind).reshape(1, -1), kind)
    return float(np.sqrt(((back - values.reshape(-1)) ** 2).mean()))


@pytest.mark.parametrize(
    ("kind", "simple"), [(Kind.Q4_K, Kind.Q4_1), (Kind.Q5_K, Kind.Q5_1), (Kind.Q6_K, Kind.Q5_0)]
)
def test_k_quants_are_more_exact_than_simple_types(kind: Kind, simple: Kind) -> None:
    values = np.random.default_rng(1).normal(0, 0.02, (64, 512)).astype(np.float32)
    assert error(values, kind) < 0.95 * error(values, simple)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_keep_what_they_can_represent(kind: Kind) -> None:
    """K-quants can represent zeros, equal numbers, and blocks with a single non-zero number."""
    values = np.zeros((4, 256), np.float32)
    values[1] = 0.25
    values[2] = -0.25
    values[3, 100] = 7.0
    (back,) = quants.dequantize(quantize(values, kind).reshape(1, -1), kind)
    assert np.allclose(back.reshape(values.shape), values, rtol=0.02, atol=1e-6)


# ---- types


def kind_of(name: str, wanted: str, *shape: int, experts: int = 1, tied: bool = False) -> str:
    return tensor_kind(name, shape, wanted, num_layers=32, num_experts=experts, tied=tied).name


def test_the_mix_gives_more_bits_to_half_of_the_layers() -> None:
    assert sum(has_more_bits(layer, 32) for layer in range(32)) == 16
    assert [layer for layer in range(8) if has_more_bits(layer, 32)] == [0, 1, 2, 3, 6]
    assert kind_of("blk.0.attn_v.weight", "Q4_K_M", 64, 256) == "Q6_K"
    assert kind_of("blk.4.ffn_down.weight", "Q4_K_M", 64, 256) == "Q4_K"
    assert kind_of("blk.0.ffn_down_exps.weight", "Q4_K_M", 4, 64, 256) == "Q6_K"
    assert kind_of("blk.0.attn_k.weight", "Q4_K_M", 64, 256) == "Q4_K"
    assert kind_of("blk.0.attn_k.weight", "Q4_K_M", 64, 256, experts=8) == "Q8_0"
    assert kind_of("blk.0.attn_qkv.weight", "Q4_K_M", 64, 256) == "Q5_K"


@pytest.mark.parametrize(
    ("name", "wanted", "shape", "kind"),
    [
        ("blk.0.attn_norm.weight", "Q4_0", (256,), "F32"),
        ("blk.0.ffn_gate_inp.weight", "Q4_0", (8, 256), "F32"),
        ("position_embd.weight", "Q8_0", (512, 256), "F32"),
        ("token_embd.weight", "Q4_K", (512, 256), "Q4_K"),
        ("output.weight", "Q4_K", (512, 256), "Q6_K"),
        ("output.weight", "Q8_0", (512, 256), "Q8_0"),
        ("blk.0.attn_q.weight", "Q4_K", (64, 96), "Q5_0"),
        ("blk.0.attn_q.weight", "Q5_K", (64, 96), "Q5_1"),
        ("blk.0.attn_q.weight", "Q6_K", (64, 96), "Q8_0"),
        ("blk.0.attn_q.weight", "Q4_0", (64, 48), "F16"),
    ],
)
def test_each_tensor_has_a_type_that_fits(
    name: str, wanted: str, shape: tuple[int, ...], kind: str
) -> None:
    assert kind_of(name, wanted, *shape) == kind


def test_a_tied_embedding_has_the_type_of_the_head() -> None:
    assert kind_of("token_embd.weight", "Q4_K_M", 512, 256, tied=True) == "Q6_K"


# ---- tokenizers


def facts(change: dict[str, Any], **fields: Any) -> TextFacts:
    tokenizer = json.loads(tiny_tokenizer().to_str()) | change
    return TextFacts(tokenizer=json.dumps(tokenizer).encode(), eos_token_ids=[0], **fields)


def template(*tokens: str) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
    ids = {token: {"id": token, "ids": [SPECIAL.index(token)]} for token in tokens}
    single.append({"Sequence": {"id": "A", "type_id": 0}})
    return {"type": "TemplateProcessing", "single": single, "special_tokens": ids}


def added(**flags: bool) -> dict[str, Any]:
    """Return the added tokens of the tiny tokenizer, with these flags on the last one."""
    tokens = json.loads(tiny_tokenizer().to_str())["added_tokens"]
    return {"added_tokens": [*tokens[:-1], tokens[-1] | flags]}


def model_with(**options: Any) -> dict[str, Any]:
    return {"model": json.loads(tiny_tokenizer().to_str())["model"] | options}


def pieces(**change: Any) -> TextFacts:
    """Return a SentencePiece tokenizer whose spaces are replaced before texts are split at them."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b", f"{SPACE}a"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True, **flags}],
        "normalizer": normalizer,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": {
            "type": "BPE",
            "vocab": {name: index for index, name in enumerate(names)},
            "merges": [[SPACE, "a"]],
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": False,
        },
    }
    return TextFacts(tokenizer=json.dumps(tokenizer | change).encode(), eos_token_ids=[0])


def test_a_bos_token_that_the_tokenizer_adds_is_added_by_the_file_too() -> None:
    text = facts(
        {"post_processor": template("<|start|>")},
        bos_token_id=1,
        special_tokens={"bos_token": "<|start|>"},
    )
    found = tokenizer_metadata(text, 320)
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert len(found["tokenizer.ggml.tokens"]) == 320
    assert gguf_text(Fields(found, "file"), 320).bos_token_id == 1


WITHOUT_TEXT = template("<|stop|>") | {"single": template("<|stop|>")["single"][:1]}
QWEN2_RULES = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": QWEN2.pre_tokenizer,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "Unigram"}}, "its model is 'Unigram', not BPE"),
        (model_with(merges=None), "its model has no list of merges"),
        (model_with(merges=["Ġ t h"]), "['Ġ', 't', 'h'] among its merges is not a pair"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "splitting texts have no name"),
        ({"normalizer": {"type": "Lowercase"}}, "splitting texts have no name"),
        ({"post_processor": template("<|stop|>")}, "it adds ['<|stop|>'] to texts"),
        ({"post_processor": WITHOUT_TEXT}, "does not have the text exactly once"),
        ({"post_processor": {"type": "RobertaProcessing"}}, "(RobertaProcessing) is not a single"),
        ({"decoder": None}, "its decoder would change"),
        (added(rstrip=True), "rstrip of its added token '<|stop|>' is True"),
        (added(lstrip=True), "lstrip of its added token '<|stop|>' is True"),
        (added(single_word=True), "single_word of its added token '<|stop|>' is True"),
        (QWEN2_RULES | added(normalized=True), "normalized of its added token '<|stop|>' is True"),
        (model_with(dropout=0.1), "dropout of its model is 0.1"),
        (model_with(vocab={"[PAD5]": 1, "a": 3}, merges=[], unk_token="a"), "unk_token of its"),
        (model_with(vocab={"[PAD2]": 3}, merges=[]) | {"added_tokens": []}, "'[PAD2]' would not"),
    ],
)
def test_a_tokenizer_that_a_file_cannot_store_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnusableModel) as refused:
        tokenizer_metadata(facts(change), 320)
    assert message in refused.value.message


def test_a_template_whose_token_has_another_id_is_refused() -> None:
    other = template("<|start|>")
    other["special_tokens"]["<|start|>"]["ids"] = [7]
    special = {"bos_token": "<|start|>"}
    text = facts({"post_processor": other}, bos_token_id=1, special_tokens=special)
    with pytest.raises(UnusableModel, match="the ids that it adds to texts would change"):
        tokenizer_metadata(text, 320)


@pytest.mark.parametrize(
    "change",
    [
        added(normalized=True),
        {"post_processor": {"type": "ByteLevel", "trim_offsets": False}},
        {"post_processor": template()},
        model_with(unk_token="<|stop|>", continuing_subword_prefix=""),
    ],
)
def test_differences_without_an_effect_are_accepted(change: dict[str, Any]) -> None:
    assert tokenizer_metadata(facts(change), 320)["tokenizer.ggml.model"] == "gpt2"


def test_pieces_are_stored_and_encode_like_the_source() -> None:
    """The split at spaces has no effect, because the normalizer has replaced all spaces."""
    source = pieces()
    stored = gguf_text(Fields(tokenizer_metadata(source, 270), "file"), 270)
    ours, theirs = (Tokenizer.from_str(each.tokenizer.decode()) for each in (stored, source))
    assert_same(ours, theirs, ["a b  ab\n", *TEXTS])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"added_tokens": []}, "'<unk>' would become an added token"),
        ({"normalizer": None}, "its normalizer would change"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "its rules for splitting texts would change"),
    ],
)
def test_pieces_that_would_be_read_back_as_others_are_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnusableModel, match=message):
        tokenizer_metadata(pieces(**change), 270)


def test_an_unknown_token_outside_the_vocabulary_is_refused() -> None:
    model = json.loads(pieces().tokenizer)["model"] | {"unk_token": "<none>"}
    with pytest.raises(UnusableModel, match="its unknown token '<none>' is not in the vocabulary"):
        tokenizer_metadata(pieces(model=model), 270)


def test_three_tokens_that_end_an_answer_are_stored_the_own_one_first() -> None:
    text = replace(facts({}), eos_token_ids=[0, 1, 2], special_tokens={"eos_token": "<|stop|>"})
    stored = gguf_text(Fields(tokenizer_metadata(text, 320), "file"), 320)
    assert stored.eos_token_ids == [2, 1, 0]
    assert stored.special_tokens["eos_token"] == "<|stop|>"


def test_a_fourth_token_that_ends_an_answer_is_found_by_its_text_or_refused() -> None:
    text = replace(facts({}), eos_token_ids=[0, 1, 2, 3])
    stored = gguf_text(Fields(tokenizer_metadata(text, 320), "file"), 320)
    assert stored.eos_token_ids == [1, 2, 3, 0]  # <|end|> is the last one
    text = replace(text, eos_token_ids=[0, 1, 2, 3, 4])
    with pytest.raises(UnusableModel, match="4 tokens that end an answer, only 3"):
        tokenizer_metadata(text, 320)


def test_tokens_that_are_never_sampled_are_stored() -> None:
    text = facts({}, defaults=SamplingDefaults(temperature=0.5, bad_words_ids=[[7], [9]]))
    stored = gguf_text(Fields(tokenizer_metadata(text, 320), "file"), 320)
    assert stored.defaults == text.defaults


@pytest.mark.parametrize(
    ("defaults", "name"),
    [
        (SamplingDefaults(min_tokens=3), "min_new_tokens"),
        (SamplingDefaults(logit_bias={5: 1.0}), "sequence_bias"),
        (SamplingDefaults(bad_words_ids=[[5, 6]]), "bad_words_ids of several tokens"),
    ],
)
def test_sampling_defaults_that_a_gguf_file_cannot_store_are_refused(
    defaults: SamplingDefaults, name: str
) -> None:
    with pytest.raises(UnusableModel, match=f"cannot store the {name} of generation_config.json"):
        tokenizer_metadata(facts({}, defaults=defaults), 320)


# ---- the command


def options(model: Path, output: Path, **changes: Any) -> argparse.Namespace:
    values = {"model": str(model), "output": str(output), "type": "Q8_0", "force": False}
    return argparse.Namespace(**(values | changes))


def test_the_command_writes_a_file_and_replaces_it_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_directory(tmp_path / "tiny", random_llama(num_hidden_layers=1))
    output = tmp_path / "tiny.gguf"
    assert command.run(options(model, output)) == 0
    assert str(output) in capsys.readouterr().out
    assert output.read_bytes()[:4] == MAGIC
    with pytest.raises(Failure, match="--force replaces it"):
        command.run(options(model, output))


@pytest.mark.parametrize(
    ("output", "message"),
    [("tiny.bin", "must end with .gguf"), ("none/tiny.gguf", "is not a directory")],
)
def test_an_output_that_cannot_be_written_is_refused(
    tmp_path: Path, output: str, message: str
) -> None:
    with pytest.raises(Failure, match=message) as refused:
        command.run(options(tmp_path, tmp_path / output))
    assert refused.value.exit_code == ExitCode.USAGE


def test_a_model_that_cannot_be_stored_ends_the_command_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Failure, match="neither 'architectures' nor 'model_type'") as refused:
        command.run(options(tmp_path, tmp_path / "tiny.gguf"))
    assert refused.value.exit_code == ExitCode.BAD_MODEL


def test_a_terminal_shows_a_bar_until_the_file_is_written(tmp_path: Path) -> None:
    model = write_directory(tmp_path / "tiny", random_llama(num_hidden_layers=1))
    words = ["quantize", str(model), str(tmp_path / "tiny.gguf")]
    with PseudoTerminal([sys.executable, "-P", "-m", "tools", *words], has_stderr=True) as terminal:
        assert eventually(lambda: terminal.shows("100%")), terminal.text
        assert eventually(lambda: terminal.shows("tiny.gguf: ")), terminal.text
