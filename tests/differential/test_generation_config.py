"""What a model's files say about generation holds for the answers of the real engine and worker:
greedy answers equal those of transformers with the same generation_config.json, and an answer ends
at the end tokens of a GGUF file, named or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from transformers import GenerationConfig

from gateway.api.openai.parameters import choices_of
from gateway.api.openai.requests import ChatBody
from tests.support.checkpoints import SPECIAL, random_llama, tiny_tokenizer, write_directory
from tests.support.eager import some_tokens
from tests.support.gguf_files import write_gguf
from tests.support.replica import Replica, load

NUM_TOKENS = 24
PROMPTS = [some_tokens(count, seed=count) for count in (5, 17)]
TEMPTING = 10
"""Tokens of the plain answers that the configs below forbid or make less likely."""


def answers(path: Path) -> list[list[int]]:
    """Return the answers to requests without sampling parameters."""
    loaded = load(path)
    body = ChatBody(messages=[], max_tokens=NUM_TOKENS)
    (params,) = choices_of(body, loaded.card.defaults)
    return Replica(loaded, token_budget=16, num_blocks=28, block_tokens=4).answers(PROMPTS, params)


@torch.no_grad()
def theirs(model: Any, **config: Any) -> list[list[int]]:
    settings = GenerationConfig(max_new_tokens=NUM_TOKENS, pad_token_id=0, **config)
    found = []
    for prompt in PROMPTS:
        (ids,) = model.generate(torch.tensor([prompt]), generation_config=settings)
        found.append(ids[len(prompt) :].tolist())
    return found


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """Return the first tokens of the plain greedy answers, which configs forbid."""
    first, second = theirs(random_llama(), do_sample=False)
    return [*first[:TEMPTING], *second[:TEMPTING]]


def configs(plain: list[int]) -> dict[str, dict[str, Any]]:
    pair = plain[2:4]
    return {
        "greedy": {"temperature": 1.5},
        "suppress_tokens": {"suppress_tokens": plain[:6]},
        "bad_words_ids": {"bad_words_ids": [pair, [plain[5]], plain[10:13]]},
        "sequence_bias": {"sequence_bias": [[[token], -3.0] for token in set(plain[:8])]},
        "repetition_penalty": {"repetition_penalty": 1.4},
        "an early end": {"eos_token_id": [plain[4], plain[14]]},
        "min_new_tokens": {"eos_token_id": [plain[4], plain[14]], "min_new_tokens": 9},
        "together": {
            "suppress_tokens": plain[:2],
            "bad_words_ids": [pair],
            "sequence_bias": [[[plain[8]], 2.0]],
            "repetition_penalty": 1.2,
            "min_new_tokens": 3,
            "eos_token_id": [plain[4]],
        },
    }


@pytest.mark.parametrize("name", configs([0] * 20))
def test_answers_are_those_of_transformers_with_the_same_file(
    tmp_path: Path, plain: list[int], name: str
) -> None:
    config = {"do_sample": False, **configs(plain)[name]}
    model = random_llama()
    path = write_directory(tmp_path, model)
    (path / "generation_config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text("{}")  # names no end token
    wanted = theirs(model, **config)
    assert answers(path) == wanted
    assert name == "greedy" or wanted != theirs(model, do_sample=False)


@pytest.mark.parametrize("names_eos", [True, False])
def test_an_answer_ends_at_an_end_token_that_a_gguf_file_does_not_name(
    tmp_path: Path, plain: list[int], *, names_eos: bool
) -> None:
    end = plain[4]
    assert end not in plain[:4]

    def add_tokenizer(writer: GGUFWriter) -> None:
        vocab = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
        tokens = [f"<{piece}>" if piece in SPECIAL else piece for piece, _ in vocab]
        tokens[end] = "<|endoftext|>"
        merges = (("Ġ", "t"), ("h", "e"))
        a_merge = next(f"{a} {b}" for a, b in merges if {a, b, a + b} <= set(tokens))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if place in (0, 1, 2, end) else 1 for place in range(len(vocab))])
        writer.add_token_merges([a_merge])
        if names_eos:
            writer.add_eos_token_id(1)

    metadata = {"general.sampling.temp": 0.0}
    path = write_gguf(
        tmp_path / "a.gguf", random_llama(), metadata=metadata, tokenizer=add_tokenizer
    )
    assert answers(path)[0] == plain[:5]
