"""Finds the tokens of a GGUF file that end an answer or mark the parts of a fill-in-the-middle
prompt. Needs no torch.

Metadata name some of these tokens, and many files name too few: Phi-3's names `<|endoftext|>` but
not `<|end|>`. llama.cpp therefore finds them by their texts too. The texts and the exceptions are
those of its src/llama-vocab.cpp, so an answer ends at the same tokens here and there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from protocol.engine.model_card import InfillTokens
from worker.errors import UnusableModel
from worker.spec.fields import Fields

log = logging.getLogger(__name__)

END_KEYS = ("eos", "eot", "eom")
"""Names in `tokenizer.ggml.NAME_token_id` of tokens that end an answer."""
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend▁of▁sentence\uff5c>",
        "[e~[",
    }
)
"""Texts of tokens that end an answer."""
MARKUP_TEXTS = frozenset({"</s>"})
"""Those of END_TEXTS that are also tags of HTML. In some vocabularies (Qwen's) they are ordinary
pieces of text, which the model writes and reads as such. llama.cpp ends answers at them all the
same."""
NORMAL = 1
"""Value of `tokenizer.ggml.token_type` for ordinary pieces of text."""
NO_ENDS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)
"""Text of a token that ends only a part of an answer -> the tokens of models that use it so."""
INFILL_KEYS = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "repository": ("fim_rep",),
    "file": ("fim_sep",),
}
"""Field of InfillTokens -> the names in `tokenizer.ggml.NAME_token_id`, the newest first."""
INFILL_END_TEXTS = {
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
}
"""Field of InfillTokens whose token ends an answer -> its texts in files that do not name it. The
other fields are found by the gateway, which also knows the order of the parts."""


def end_tokens(fields: Fields, tokens: Sequence[str]) -> list[int]:
    """Return the ids of the tokens that end an answer: first those that the metadata name, then
    those that are found by their texts. Raises UnusableModel if the metadata name a token outside
    the vocabulary."""
    # If two tokens have the same text, the first one is used. A vocabulary is long, so each start
    # waits for these loops.
    ids = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
    infill = infill_tokens(fields, len(tokens))
    named = [token_id(fields, name, len(tokens)) for name in END_KEYS]
    named += [getattr(infill, role) for role in INFILL_END_TEXTS]
    kinds: Any = fields.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        kinds = [None] * len(tokens)
    known = [(text, kind) for text, kind in zip(tokens, kinds, strict=True) if text in END_TEXTS]
    texts = [text for text, kind in known if ends_answer(text, kind)]
    for role, spellings in INFILL_END_TEXTS.items():
        if getattr(infill, role) is None:
            texts += [text for text in spellings if text in ids][:1]
    parts = {text for text, others in NO_ENDS if others <= ids.keys()}
    ends = [end for end in named if end is not None and tokens[end] not in parts]
    found = [ids[text] for text in dict.fromkeys(texts) if text not in parts]
    if found := [end for end in found if end not in ends]:
        log.info(
            "the file does not name all tokens that end an answer; found by their text: %s",
            ", ".join(f"{tokens[end]!r} ({end})" for end in found),
        )
    return list(dict.fromkeys(ends + found))


def ends_answer(text: str, kind: int | None) -> bool:
    """Return whether the text of a token shows that it ends an answer.

    kind  the token's type in the file; None: unknown
    """
    return text in END_TEXTS and not (kind == NORMAL and text in MARKUP_TEXTS)


def infill_tokens(fields: Fields, num_tokens: int) -> InfillTokens:
    """Return the tokens of fill-in-the-middle prompts that the metadata name. Raises UnusableModel
    if one of them is outside the vocabulary."""
    found: dict[str, int] = {}
    for role, names in INFILL_KEYS.items():
        ids = (token_id(fields, name, num_tokens) for name in names)
        if (first := next((each for each in ids if each is not None), None)) is not None:
            found[role] = first
    return InfillTokens(**found)


def token_id(fields: Fields, name: str, num_tokens: int) -> int | None:
    """Return `tokenizer.ggml.NAME_token_id`; None if it is missing or negative. Raises
    UnusableModel if it is not below `num_tokens`."""
    key = f"tokenizer.ggml.{name}_token_id"
    token = fields.integer(key, -1)
    if token >= num_tokens:
        raise UnusableModel(f"{key} is {token:,}; there are {num_tokens:,} tokens")
    return token if token >= 0 else None
