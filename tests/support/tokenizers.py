"""Tokenizers for tests, as the bytes of a tokenizer.json, and cards around them.

The default model's tokenizer is real. The tokenizers of other families cut texts as the published
ones do, and have a small vocabulary that is learnt when the tokenizer is made.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers as hf
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from gateway.text.tokenizer import Tokenizer
from protocol.engine.model_card import ModelCard
from tests.support.model import smollm2_gguf
from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.gguf_tokenizer import tokenizer_json
from worker.spec.fields import Fields

REAL_TOKENIZERS = Path(__file__).parents[3] / "shared" / "tokenizers"
"""If this folder exists, tests use the real vocabularies in it as well."""
DATA = Path(__file__).parents[1] / "data"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, kw_only=True)
class TokenizerFamily:
    """The rules by which the tokenizers of a model family cut texts, without their vocabulary.

    splits    patterns; a text is cut by the first, its parts by the second, and so on
    special   added tokens without text
    marks     added tokens that are text
    begins    whether an encoded text starts with the BOS token
    """

    splits: tuple[str, ...]
    bos: str | None
    eos: str
    special: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    begins: bool = False
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False

    def build(self) -> bytes:
        """Return a tokenizer.json of the family, with a small vocabulary learnt from our texts."""
        inner = hf.Tokenizer(models.BPE(ignore_merges=self.ignore_merges))
        if self.normalizer is not None:
            inner.normalizer = self.normalizer
        cut = [pre_tokenizers.Split(hf.Regex(split), "isolated") for split in self.splits]
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([*cut, bytes_of])
        inner.decoder = decoders.ByteLevel()
        learn = trainers.BpeTrainer(
            vocab_size=1000,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
        inner.train_from_iterator([(DATA / "prose.txt").read_text(), *OTHER_SCRIPTS * 9], learn)
        ends = [token for token in (self.bos, self.eos) if token]
        inner.add_special_tokens([*ends, *self.special])
        inner.add_tokens([hf.AddedToken(m, special=False, normalized=False) for m in self.marks])
        if self.begins and self.bos is not None:
            known = [(self.bos, inner.token_to_id(self.bos))]
            inner.post_processor = processors.TemplateProcessing(
                single=f"{self.bos} $A", pair=None, special_tokens=known
            )
        return inner.to_str().encode()


OTHER_SCRIPTS = [
    "Grüße aus Köln, ¿qué tal? naïve façade; Ωμέγα, русский текст, 한국어, العربية",
    "日本語のテキスト 你好世界! 👩🏽‍🚀 says: 🙂",
    "def f(x: int) -> int:\n    return x ** 2\n\n\nclass A:\n\tpass\n",
    '{"name": "get_weather", "arguments": {"city": "Köln", "days": [1, 2.5e-3, null]}}\n```json\n',
    '{"x": [{"y": {}}]}',
]
_DEEPSEEK_TOOLS = ("calls", "call", "outputs", "output")
FAMILIES = {
    "qwen3": TokenizerFamily(
        splits=(_LETTERS % r"\p{N}" + _BLANKS,),
        bos=None,
        eos="<|im_end|>",
        special=("<|endoftext|>", "<|im_start|>"),
        marks=tuple(
            f"<{slash}{name}>"
            for name in ("tool_call", "tool_response", "think")
            for slash in ("", "/")
        ),
        normalizer=normalizers.NFC(),
    ),
    "llama3_1": TokenizerFamily(
        splits=(_LETTERS % r"\p{N}{1,3}" + _BLANKS,),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        special=("<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        begins=True,
        ignore_merges=True,
    ),
    "deepseek_v3": TokenizerFamily(
        splits=(
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
        ),
        bos="<\uff5cbegin▁of▁sentence\uff5c>",
        eos="<\uff5cend▁of▁sentence\uff5c>",
        special=("<\uff5c▁pad▁\uff5c>", "<|EOT|>"),
        marks=(
            *(f"<\uff5c{name}\uff5c>" for name in ("User", "Assistant", "tool▁sep")),
            *(
                f"<\uff5ctool▁{name}▁{end}\uff5c>"
                for name in _DEEPSEEK_TOOLS
                for end in ("begin", "end")
            ),
        ),
        normalizer=normalizers.Sequence([]),
    ),
}
REAL_NAMES = tuple(f"real {name}" for name in FAMILIES if (REAL_TOKENIZERS / name).exists())
FAMILY_NAMES = (*FAMILIES, *REAL_NAMES)


@cache
def family_json(name: str) -> bytes:
    """Return the tokenizer.json of a family; the published one if `name` starts with "real "."""
    if name in FAMILIES:
        return FAMILIES[name].build()
    return (REAL_TOKENIZERS / name.removeprefix("real ") / "tokenizer.json").read_bytes()


def chat_template(name: str) -> str:
    """Return the chat template of the family `name`, which may have the prefix "real "."""
    return (DATA / "chat_templates" / f"{name.removeprefix('real ')}.jinja").read_text()


def family_of(name: str) -> TokenizerFamily:
    """Return the family `name`, which may have the prefix "real "."""
    return FAMILIES[name.removeprefix("real ")]


def byte_fallback_json(*, decoder: str = "strip") -> bytes:
    """Return a small tokenizer.json like SentencePiece's: words that start with a blank mark, and
    `<0xNN>` for all other bytes.

    decoder   "strip" as in Llama 2, "metaspace" as in T5; ByteCodec does not support "wordpiece"
    """
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += ["▁", "▁Hello", "▁world", "Hello", ",", ".", "▁▁", "▁a▁b", "é", "ing", "##ing", "語"]
    vocab = {word: i for i, word in enumerate(words)}
    inner = hf.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = {
        "strip": lambda: decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        "metaspace": lambda: decoders.Metaspace(),
        "wordpiece": lambda: decoders.WordPiece(prefix="##", cleanup=False),
    }[decoder]()
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner.to_str().encode()


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """Return the tokenizer of "smollm2" or of a family, made once for all tests."""
    if name == "smollm2":
        return Tokenizer(card_of(smollm2_tokenizer_json(), eos_token_ids=[2]))
    return Tokenizer(card_of(family_json(name)))


@cache
def smollm2_tokenizer_json() -> bytes:
    """Return the default model's tokenizer.json, as the worker exports it."""
    path = smollm2_gguf()
    return tokenizer_json(Fields(GGUFFile(path).metadata, str(path)))


def card_of(tokenizer: bytes, **fields: Any) -> ModelCard:
    """Return the card of a model that consists of a tokenizer only."""
    known: dict[str, Any] = {
        "name": "test",
        "architecture": "LlamaForCausalLM",
        "digest": "00",
        "vocab_size": 1 << 18,
        "context_tokens": 8192,
        "eos_token_ids": [],
    }
    return ModelCard(tokenizer=tokenizer, **(known | fields))


def family_card(name: str) -> ModelCard:
    """Return the card of a model that consists of a family's tokenizer and its end token."""
    inner = hf.Tokenizer.from_buffer(family_json(name))
    end = inner.token_to_id(family_of(name).eos)
    return card_of(family_json(name), vocab_size=inner.get_vocab_size(), eos_token_ids=[end])


def cuts(items: Any, seed: int) -> list[Any]:
    """Return the pieces of `items`, a string or a list, cut at random places."""
    rng = random.Random(seed)
    pieces, start = [], 0
    while start < len(items):
        end = start + rng.choice((1, 1, 2, 3, 7))
        pieces.append(items[start:end])
        start = end
    return pieces
