"""A vocabulary of single characters, and functions that match texts with a compiled grammar."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine_core.grammar.compiler import Compiler
from engine_core.grammar.masks import compute_masks
from engine_core.grammar.matcher import Matcher
from protocol.engine.grammar import Body, Grammar
from protocol.engine.model_card import ModelCard

EOS = 0
SIGNS = "\n" + "".join(map(chr, range(0x20, 0x7F)))
"""The characters that are tokens. Token 1 is a line feed, token 2 a blank, token 96 a tilde."""
MARKERS = {"<think>": 97, "</think>": 98, "<tool>": 99, "</tool>": 100, "[CALL]": 101, "word": 102}
"""Tokens of several characters. The last is a word, not a marker."""
SPECIAL = {"<eos>", "<think>", "</think>"}


def signs_tokenizer(*, markers: bool = True) -> bytes:
    """Return a tokenizer.json with 97 tokens, or with 103 if it has the markers."""
    spelt = {" ": "Ġ", "\n": "Ċ"}
    vocab = {spelt.get(sign, sign): number for number, sign in enumerate(SIGNS, 1)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab | {"<eos>": EOS}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    for name in MARKERS if markers else ():
        added = tokenizers.AddedToken(name, special=name in SPECIAL, normalized=False)
        inner.add_tokens([added])
    return inner.to_str().encode()


def signs_card(*, markers: bool = True) -> ModelCard:
    return ModelCard(
        name="signs",
        architecture="Signs",
        digest="00",
        vocab_size=103 if markers else 97,
        context_tokens=512,
        tokenizer=signs_tokenizer(markers=markers),
        eos_token_ids=[EOS],
    )


def ids_of(text: str) -> list[int]:
    """Return the tokens of a text, character by character. Markers are spelt out."""
    return [SIGNS.index(sign) + 1 for sign in text]


def text_of(tokens: list[int]) -> str:
    names = {number: name for name, number in MARKERS.items()}
    return "".join(names.get(token) or SIGNS[token - 1] for token in tokens if token != EOS)


def possible(matcher: Matcher, vocab_size: int) -> set[int]:
    bits = int.from_bytes(compute_masks([matcher], vocab_size).data, "little")
    lowest_first = f"{bits:b}"[::-1]
    return {token for token, bit in enumerate(lowest_first[:vocab_size]) if bit == "1"}


def read(compiler: Compiler, body: Body, *parts: str | int, **around: Any) -> str:
    """Match an answer, given as texts and token ids, with the grammar of `body`.

    Return the rest of the answer from the first token that the grammar does not allow. If all of it
    is allowed, return "$$" if the answer must end there, "$" if it may, else "".

    around   the other fields of the grammar
    """
    matcher = compiler.compile(Grammar(body=body, **around)).start()
    size = compiler.vocab_size
    tokens = [t for part in parts for t in ([part] if isinstance(part, int) else ids_of(part))]
    for place, token in enumerate(tokens):
        if token not in possible(matcher, size):
            return text_of(tokens[place:])
        matcher.consume(token)
        assert matcher.error is None
    if matcher.is_complete:
        return "$$"
    return "$" if EOS in possible(matcher, size) else ""


def schema(**properties: object) -> str:
    """Return the JSON Schema of an object that has exactly these properties."""
    return json.dumps(
        {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    )
