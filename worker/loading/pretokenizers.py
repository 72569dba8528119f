"""Pre-tokenizers of byte-level vocabularies: how text is split before merging, by family.

GGUF files only name the family. The values here are parts of a `tokenizer.json`, as Hugging Face
`tokenizers` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Part = dict[str, Any]

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3_SPLIT = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _REST
QWEN2_SPLIT = _CONTRACTIONS + _WORD + r"|\p{N}" + _REST


def _bytes(*, use_regex: bool) -> Part:
    """Map bytes to printable characters; `use_regex` splits as GPT-2 does first."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(regex: str) -> Part:
    return {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }


@dataclass(frozen=True, slots=True)
class Family:
    """Splitting rules of one family.

    ignore_merges   a piece that is a token is not split by merges
    adds_bos        the default, if the file does not set it
    """

    steps: tuple[Part, ...]
    normalizer: Part | None = None
    ignore_merges: bool = False
    adds_bos: bool = False

    @property
    def pre_tokenizer(self) -> Part:
        return {"type": "Sequence", "pretokenizers": list(self.steps)}


GPT2 = Family((_bytes(use_regex=True),))
SMOLLM = Family(({"type": "Digits", "individual_digits": True}, _bytes(use_regex=True)))
LLAMA3 = Family((_split(LLAMA3_SPLIT), _bytes(use_regex=False)), ignore_merges=True, adds_bos=True)
QWEN2 = Family((_split(QWEN2_SPLIT), _bytes(use_regex=False)), normalizer={"type": "NFC"})

FAMILIES = {
    "default": GPT2,
    "gpt-2": GPT2,
    "smollm": SMOLLM,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}
"""`tokenizer.ggml.pre` -> family."""
