"""Converts tokenizers to GGUF metadata and back, and has texts on which the original and the
rebuilt tokenizer must agree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from worker.checkpoint.gguf_tokenizer import tokenizer_json
from worker.spec.fields import Fields

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces, three   inside, and at the end  ",
    "It's 1234567890 o'clock, isn't it? I'LL say 3.14159 or 1,000,000.",
    "tabs\tand\nnewlines\r\n\r\n\n  then indented",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n",
    "Grüße aus Köln, naïve façade, Ωμέγα, русский текст, 日本語のテキスト, 한국어, العربية",
    "e\u0301 against \u00e9, \ufb01 ligature",
    "🙂👩‍👩‍👧‍👦🇩🇪 \u200b\u200d\ufeff \x00\x01\x7f",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9\\n"}',
    "https://example.org/a_b?c=d&e=%20#f  <b>bold</b> $x^2_{i}$",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|> <|im_end|>x<|endoftext|>  y<|im",
    "a" * 300 + " " * 50 + "!" * 40,
    *(NUMBERS := ["x 1  2   3    45", "\u2460\u00bd \u0663 numbers, 2\u00b2 \u2167"]),
]
"""NUMBERS are the texts that show whether digits are split off first."""

# fmt: off
BLANKS = [" ", "  ", "\t", "\n", "\r", "\r\n", "\n\n", " \n ", "\u00a0", "\u3000", "\x0b", "\u2028"]
WORDS = [
    "a", "It's", "we'LL", "'\u017f", "it\u2019s", "CamelCase", "HTTPServer2", "e\u0301", "\ufb01n",
    "\u01c5", "\u02b0x", "Straße", "\u0130i", "\u212a", "ΩΣς", "Ёлка", "日本語", "カタ", "العربية",
    "\u1112\u1161\u11ab", "हिन्दी", "ไทย", "ქართ", "\u0300", "x\u0301\u0302", "\U0001d400",
]
DIGITS = ["0", "42", "1234567890", "3.14", "1,000", "\u0663", "½", "²", "\u2167", "1e-9", "0x1F"]
SIGNS = [
    "!", "?!", "...", "--", "\u2014", "_", "__init__", "'", '"', "\\n", "//", "#!", "&amp;", "<b>",
    "</s>", "<|im_", "|>", "<0x0A>", '{"a":', "()=>", "\u200d", "\u200b", "\ufeff", "\x00",
    "\x1b[0m", "\ufffd", "\ue000", "\U000e0061", "🙂", "👩🏽‍🚀", "🇩🇪", "\ufe0f", "\u2260",
]
# fmt: on


def odd_texts(count: int, marks: Sequence[str] = ()) -> list[str]:
    """Return texts of odd blanks, words, digits and signs in random order; some have long runs or
    characters of any script. They are the same in each call.

    marks   tokens that are matched before merging
    """
    dice, texts = random.Random(1), []
    kinds = [BLANKS, WORDS, DIGITS, [*SIGNS, *marks]]
    for _ in range(count):
        parts = [dice.choice(dice.choice(kinds)) for _ in range(dice.randrange(1, 14))]
        if dice.random() < 0.15:
            parts.append(dice.choice(parts) * dice.randrange(2, 40))
        if dice.random() < 0.2:
            parts += [chr(dice.choice((0x20, 0xE000)) + dice.randrange(0xD7E0)) for _ in range(6)]
        texts.append("".join(parts))
    return texts


def rebuilt(metadata: dict[str, Any]) -> Tokenizer:
    values = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return Tokenizer.from_str(tokenizer_json(Fields(values, "test")).decode())


def as_metadata(original: dict[str, Any], pre: str) -> dict[str, Any]:
    """Return the GGUF metadata of a byte-level tokenizer.json."""
    vocab = dict(original["model"]["vocab"])
    kinds = dict.fromkeys(vocab.values(), 1)
    for token in original["added_tokens"]:
        vocab[token["content"]] = token["id"]
        kinds[token["id"]] = 3 if token["special"] else 4
    merges = original["model"]["merges"]
    ordered = sorted(vocab.items(), key=lambda item: item[1])
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [token for token, _ in ordered],
        "token_type": [kinds[index] for _, index in ordered],
        "merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
    }


def assert_same(ours: Tokenizer, theirs: Tokenizer, texts: list[str] = TEXTS) -> None:
    for text in texts:
        for special in (False, True):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special).ids == expected.ids, text
        ids = expected.ids
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )
