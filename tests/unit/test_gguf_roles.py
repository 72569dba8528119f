"""Tokens of a GGUF file that end an answer: named by the metadata, or found by their texts."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from worker.checkpoint.gguf_roles import END_TEXTS, INFILL_END_TEXTS, end_tokens
from worker.checkpoint.gguf_tokenizer import gguf_text
from worker.checkpoint.gguf_tokens import CONTROL, NORMAL, USER_DEFINED
from worker.errors import UnusableModel
from worker.spec.fields import Fields

INFILL_ENDS = [text for texts in INFILL_END_TEXTS.values() for text in texts]
SMOLLM2 = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "Paris"]
"""The first tokens of the default model, whose file names `<|im_end|>`, and an ordinary one."""
QWEN = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|fim_prefix|>"),
    *("<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
]
"""The control tokens of Qwen2.5-Coder, whose published file names `<|im_end|>` alone."""
PHI3 = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|end|>", "<|system|>"]
HARMONY = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|end|>", "<|call|>"]
SOLAR = ["<|begin|>", "<|end|>", "<|flush|>", "<|calls|>"]
GEMMA4 = ["<pad>", "<eos>", "</s>", "<|tool_response>", "<turn|>"]


def file(tokens: list[str], named: Mapping[str, int], **kinds: int) -> Fields:
    """Return the metadata of a byte-level tokenizer. `named` has the ids that the file names, and
    `kinds` the types of tokens that are no control tokens."""
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, CONTROL) for token in tokens],
        "tokenizer.ggml.merges": [],
    }
    values |= {f"tokenizer.ggml.{role}_token_id": token for role, token in named.items()}
    return Fields(values, "file.gguf")


@pytest.mark.parametrize(
    ("tokens", "named", "ends"),
    [
        (SMOLLM2, {"eos": 2}, "<|im_end|> <|endoftext|> <reponame>"),
        (SMOLLM2, {"eos": 0}, "<|endoftext|> <|im_end|> <reponame>"),
        (SMOLLM2, {}, "<|endoftext|> <|im_end|> <reponame>"),
        (SMOLLM2, {"eos": 5}, "Paris <|endoftext|> <|im_end|> <reponame>"),
        (QWEN, {"eos": 2}, "<|im_end|> <|endoftext|> <|fim_pad|> <|repo_name|> <|file_sep|>"),
        (
            QWEN,
            {"eos": 2, "fim_pad": 3, "fim_rep": 8},
            "<|im_end|> <|object_ref_start|> <|repo_name|> <|endoftext|> <|file_sep|>",
        ),
        (PHI3, {"eos": 3}, "<|endoftext|> </s> <|end|>"),
        (HARMONY, {"eos": 2}, "<|return|> <|endoftext|> <|call|>"),
        (HARMONY, {"eos": 2, "eot": 4}, "<|return|> <|endoftext|> <|call|>"),
        (SOLAR, {"eos": 2}, "<|flush|> <|calls|>"),
        (GEMMA4, {"eos": 1, "eot": 4}, "<eos> <turn|> <|tool_response>"),
    ],
)
def test_a_file_has_the_ends_of_llama_cpp_the_named_ones_first(
    tokens: list[str], named: Mapping[str, int], ends: str
) -> None:
    found = gguf_text(file(tokens, named), 320).eos_token_ids
    assert [tokens[end] for end in found] == ends.split()


@pytest.mark.parametrize("text", [*sorted(END_TEXTS), *INFILL_ENDS])
def test_each_known_text_ends_an_answer_in_a_file_that_names_no_token(text: str) -> None:
    assert end_tokens(file(["a", text], {}), ["a", text]) == [1]


def test_a_tag_of_html_that_is_an_ordinary_piece_of_text_ends_nothing() -> None:
    tokens = ["a", "</s>", "<|im_end|>"]
    text = gguf_text(file(tokens, {"eos": 2}, **{"a": NORMAL, "</s>": NORMAL}), 320)
    assert text.eos_token_ids == [2]
    added = json.loads(text.tokenizer)["added_tokens"]
    assert [token["content"] for token in added] == ["<|im_end|>"]
    assert gguf_text(file(tokens, {"eos": 2}), 320).eos_token_ids == [2, 1]


def test_what_is_found_by_text_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        gguf_text(file(QWEN, {"eos": 2}), 320)
    (message,) = caplog.messages
    assert message == (
        "the file does not name all tokens that end an answer; found by their text: "
        "'<|endoftext|>' (0), '<|fim_pad|>' (7), '<|repo_name|>' (8), '<|file_sep|>' (9)"
    )
    caplog.clear()
    named = {"eos": 2, "eot": 0}
    gguf_text(file(["<|endoftext|>", "a", "<|im_end|>"], named), 320)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("kind", "is_special"), [(NORMAL, True), (USER_DEFINED, False), (CONTROL, True)]
)
def test_a_token_that_ends_an_answer_is_matched_whatever_its_type(
    kind: int, is_special: bool
) -> None:
    text = gguf_text(file(["a", "<|im_end|>"], {}, a=NORMAL, **{"<|im_end|>": kind}), 320)
    (added,) = json.loads(text.tokenizer)["added_tokens"]
    assert (added["content"], added["special"]) == ("<|im_end|>", is_special)


def test_a_named_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UnusableModel, match="eot_token_id is 6; there are 6 tokens"):
        gguf_text(file(SMOLLM2, {"eot": 6}), 320)


def test_an_encoder_has_no_tokens_that_end_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    values = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581a"],
        "tokenizer.ggml.token_type": [CONTROL, 2, CONTROL, CONTROL, NORMAL],
        "tokenizer.ggml.unknown_token_id": 1,
    }
    with caplog.at_level(logging.INFO):
        assert gguf_text(Fields(values, "file.gguf"), 320).eos_token_ids == []
    assert caplog.messages == []
