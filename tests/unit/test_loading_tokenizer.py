"""Tokenizers that are rebuilt from GGUF metadata encode like the originals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.support.checkpoints import SPECIAL, tiny_tokenizer
from tests.support.gguf_tokenizers import TEXTS, as_metadata, assert_same, rebuilt
from worker.checkpoint.gguf_tokenizer import tokenizer_json
from worker.errors import UnusableModel
from worker.spec.fields import Fields


def test_the_default_pretokenizer_is_gpt2() -> None:
    original = json.loads(tiny_tokenizer().to_str())
    for pre in ("gpt-2", "default"):
        assert_same(rebuilt(as_metadata(original, pre)), tiny_tokenizer())
    unnamed = as_metadata(original, "default")
    del unnamed["pre"]
    assert_same(rebuilt(unnamed), tiny_tokenizer())


PUBLISHED = {
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    **dict.fromkeys(
        ("lfm2", "pixtral", "llama-bpe"),
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "hunyuan": (  # of its class with tiktoken
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "seed-coder": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}|"
        r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "dbrx": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""`tokenizer.ggml.pre` -> the pattern in the published tokenizer.json of the family."""


def rebuilt_json(pre: str) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(
        rebuilt(as_metadata(json.loads(tiny_tokenizer().to_str()), pre)).to_str()
    )
    return whole


@pytest.mark.parametrize("pre", PUBLISHED)
def test_words_are_split_as_in_the_published_tokenizer(pre: str) -> None:
    steps = rebuilt_json(pre)["pre_tokenizer"]["pretokenizers"]
    ours = pre_tokenizers.Split(Regex(steps[0]["pattern"]["Regex"]), "isolated")
    theirs = pre_tokenizers.Split(Regex(PUBLISHED[pre]), "isolated")
    assert steps[0]["behavior"] == "Isolated"
    assert len(steps) == 2
    assert not steps[1]["use_regex"]
    for text in TEXTS:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_command_r_normalizes_and_splits_off_each_digit() -> None:
    whole = rebuilt_json("command-r")
    assert whole["normalizer"] == {"type": "NFC"}
    digits, by_words = whole["pre_tokenizer"]["pretokenizers"]
    assert digits == {"type": "Digits", "individual_digits": True}
    assert by_words["use_regex"]


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True)])
def test_bos_and_eos_are_added_if_the_file_requests_them(bos: bool, eos: bool) -> None:
    metadata = as_metadata(json.loads(tiny_tokenizer().to_str()), "gpt-2")
    metadata |= {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": bos, "add_eos_token": eos}
    ours = rebuilt(metadata)
    plain = tiny_tokenizer().encode("the").ids
    assert ours.encode("the").ids == [1] * bos + plain + [2] * eos
    assert ours.encode("the", add_special_tokens=False).ids == plain


def sentencepiece_like() -> Tokenizer:
    """Return a tokenizer like that of Llama 2, trained on TEXTS.

    It adds a space before each text, replaces spaces by "▁", encodes unknown characters as bytes,
    and starts each text with <s>.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>"]
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=special + in_bytes, limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = values["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(values))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def test_the_merges_of_a_sentencepiece_vocabulary_are_rebuilt_from_its_scores() -> None:
    original = sentencepiece_like()
    vocab = sorted(original.get_vocab().items(), key=lambda item: item[1])
    ranks = {"".join(m): -i for i, m in enumerate(json.loads(original.to_str())["model"]["merges"])}
    metadata = {
        "model": "llama",
        "tokens": [piece for piece, _ in vocab],
        "scores": [float(ranks.get(piece, 0)) for piece, _ in vocab],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(vocab) - 259)],
        "bos_token_id": 1,
        "unknown_token_id": 0,
    }
    assert len(ranks) > 100
    assert_same(rebuilt(metadata), original)
    bare = rebuilt(metadata | {"add_space_prefix": False, "add_bos_token": False})
    assert bare.decode(bare.encode("Hello, world!").ids) == "Hello, world!"
    assert not bare.encode("Hello, world!").tokens[0].startswith("▁")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "'rwkv'"),
        ({"pre": "kimi-k2"}, "'kimi-k2'"),
        ({"merges": ["Ġ nothing"]}, "merge 'Ġ nothing'"),
        ({"merges": ["Ġ"]}, "merge 'Ġ'"),
        ({"merges": "Ġ t"}, "merges is missing, or is not a list"),
        ({"tokens": [1, 2]}, "tokens is missing, or is not a list"),
        ({"token_type": [1]}, "token_type is not a list of"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused_with_the_reason(
    changes: dict[str, Any], message: str
) -> None:
    metadata = as_metadata(json.loads(tiny_tokenizer().to_str()), "gpt-2")
    with pytest.raises(UnusableModel, match=message):
        rebuilt(metadata | changes)


def test_control_tokens_are_special_and_user_defined_tokens_are_not() -> None:
    metadata = as_metadata(json.loads(tiny_tokenizer().to_str()), "gpt-2")
    metadata["tokens"].append("<think>")
    metadata["token_type"].append(4)
    ours = rebuilt(metadata)
    think = ours.token_to_id("<think>")
    assert ours.encode("a<think>").ids[-1] == think
    assert ours.decode([0, think, 1], skip_special_tokens=True) == "<think>"
    assert [t.content for t in ours.get_added_tokens_decoder().values() if t.special] == SPECIAL


def test_a_rebuilt_tokenizer_can_be_loaded_from_one_file(tmp_path: Path) -> None:
    data = tokenizer_json(
        Fields(
            {
                f"tokenizer.ggml.{key}": value
                for key, value in as_metadata(
                    json.loads(tiny_tokenizer().to_str()), "smollm"
                ).items()
            },
            "test",
        )
    )
    (tmp_path / "tokenizer.json").write_bytes(data)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("12").tokens == ["1", "2"]
