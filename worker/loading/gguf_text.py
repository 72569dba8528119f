"""Text side of a GGUF file: tokenizer, templates, sampling defaults. Needs no torch."""

from __future__ import annotations

from typing import Any

from protocol.model_card import SamplingDefaults
from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields
from worker.loading.gguf_tokenizer import tokenizer_json
from worker.loading.text import TOOL_USE, TextFacts


def gguf_text(fields: Fields, vocab_size: int) -> TextFacts:
    tokens: Any = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or len(tokens) > vocab_size:
        raise UnusableModel(f"the tokenizer does not fit a vocabulary of {vocab_size:,}")
    ids = {name: _token_id(fields, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
    unknown, padding = (_token_id(fields, n, len(tokens)) for n in ("unknown", "padding"))
    named = {"bos": ids["bos"], "eos": ids["eos"], "unk": unknown, "pad": padding}
    ends = [ids[name] for name in ("eos", "eot", "eom")]
    return TextFacts(
        tokenizer=tokenizer_json(fields),
        eos_token_ids=list(dict.fromkeys(end for end in ends if end is not None)),
        bos_token_id=ids["bos"],
        pad_token_id=padding,
        special_tokens={f"{n}_token": tokens[i] for n, i in named.items() if i is not None},
        chat_template=fields.text("tokenizer.chat_template", "") or None,
        tool_use_template=fields.text(f"tokenizer.chat_template.{TOOL_USE}", "") or None,
        defaults=_defaults(fields),
        license=fields.text("general.license", "") or None,
    )


def _token_id(fields: Fields, name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token = fields.integer(key, -1)
    if token >= num_tokens:
        raise UnusableModel(f"{key} is {token:,}; there are {num_tokens:,} tokens")
    return token if token >= 0 else None


def _defaults(fields: Fields) -> SamplingDefaults:
    def number(name: str) -> float | None:
        key = f"general.sampling.{name}"
        return None if fields.get(key) is None else fields.number(key)

    top_k = fields.get("general.sampling.top_k")
    return SamplingDefaults(
        temperature=number("temp"),
        top_p=number("top_p"),
        top_k=None if top_k is None else fields.integer("general.sampling.top_k"),
        min_p=number("min_p"),
        repetition_penalty=number("penalty_repeat"),
    )
