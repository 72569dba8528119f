"""Metadata of a tokenizer in a GGUF file: the inverse of `loading.gguf_tokenizer`.

A GGUF file only names how the text is split before merging. A tokenizer whose rules have no name
is refused, and so is one that would be read back as another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields
from worker.loading.gguf_tokenizer import CONTROL, FAMILIES, UNKNOWN, USER_DEFINED, tokenizer_json
from worker.loading.text import TOOL_USE, TextFacts, token_ids

Values = dict[str, Any]
NORMAL, UNUSED, BYTE = 1, 5, 6
PREFIX = "tokenizer.ggml."
ENDS = ("eos", "eot", "eom")
"""Roles of the tokens that end an answer, in the order in which they are read."""


def tokenizer_metadata(text: TextFacts, vocab_size: int) -> Values:
    """Return the metadata of the tokenizer, the templates and the sampling defaults.

    Raises UnusableModel if a GGUF file cannot store them.
    """
    tokenizer = msgspec.json.decode(text.tokenizer)
    model = tokenizer.get("model") or {}
    if model.get("type", "BPE") != "BPE":
        raise _refused(f"its model is {model.get('type')!r:.40}, not BPE")
    kind = "llama" if model.get("byte_fallback") else "gpt2"
    merges = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
    tokens, types = _tokens(tokenizer, vocab_size, kind)
    before, after = _markers(tokenizer.get("post_processor"))
    bos = text.special_tokens.get("bos_token")
    eos = tokens[text.eos_token_ids[0]] if text.eos_token_ids else None
    if before not in ([], [bos]) or after not in ([], [eos]):
        raise _refused(f"it adds {before + after} to texts, which are not BOS and EOS")
    found: Values = {
        f"{PREFIX}model": kind,
        f"{PREFIX}tokens": tokens,
        f"{PREFIX}token_type": types,
        f"{PREFIX}add_bos_token": bool(before),
        f"{PREFIX}add_eos_token": bool(after),
    }
    if kind == "llama":
        found |= _sentencepiece(tokenizer, merges, tokens)
    else:
        found[f"{PREFIX}pre"] = _pre_name(tokenizer)
        found[f"{PREFIX}merges"] = [" ".join(merge) for merge in merges]
    found |= _ids(text) | _texts(text)
    _check(found, tokenizer, merges)
    return found


def _tokens(tokenizer: Any, vocab_size: int, kind: str) -> tuple[list[str], list[int]]:
    """Return the tokens by id, and their types. Ids without a token get a name."""
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, index in token_ids(tokenizer).items():
        if not 0 <= index < vocab_size:
            raise _refused(f"token {token!r:.40} has the id {index}, outside the vocabulary")
        is_byte = kind == "llama" and len(token) == 6 and token.startswith("<0x")
        tokens[index], types[index] = token, BYTE if is_byte else NORMAL
    for added in tokenizer.get("added_tokens") or []:
        types[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    unknown = (tokenizer.get("model") or {}).get("unk_token")
    if kind == "llama" and unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    return tokens, types


def _sentencepiece(tokenizer: Any, merges: list[list[str]], tokens: list[str]) -> Values:
    """Return the scores: earlier merges are better. Other pieces are never merged."""
    rank: dict[str, int] = {}
    for left, right in merges:
        rank.setdefault(left + right, len(rank))
    normalizer = tokenizer.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    return {
        f"{PREFIX}pre": "default",
        f"{PREFIX}scores": [-float(rank.get(token, len(rank))) for token in tokens],
        f"{PREFIX}add_space_prefix": any(step.get("type") == "Prepend" for step in steps),
        f"{PREFIX}unknown_token_id": tokens.index(tokenizer["model"].get("unk_token") or tokens[0]),
    }


def _ids(text: TextFacts) -> Values:
    ends = dict(zip(ENDS, text.eos_token_ids, strict=False))
    ids = {"bos": text.bos_token_id, "padding": text.pad_token_id, **ends}
    return {f"{PREFIX}{name}_token_id": each for name, each in ids.items() if each is not None}


def _texts(text: TextFacts) -> Values:
    defaults = text.defaults
    found = {
        "tokenizer.chat_template": text.chat_template,
        f"tokenizer.chat_template.{TOOL_USE}": text.tool_use_template,
        "general.license": text.license,
        "general.sampling.temp": defaults.temperature,
        "general.sampling.top_p": defaults.top_p,
        "general.sampling.top_k": defaults.top_k,
        "general.sampling.min_p": defaults.min_p,
        "general.sampling.penalty_repeat": defaults.repetition_penalty,
    }
    return {name: value for name, value in found.items() if value is not None}


def _markers(processor: Any) -> tuple[list[str], list[str]]:
    """Return the tokens that are added before and after a text."""
    for step in _flat(processor, "processors"):
        if step.get("type") == "TemplateProcessing":
            parts = [part.get("SpecialToken", {}).get("id") for part in step["single"]]
            middle = parts.index(None)
            return parts[:middle], parts[middle + 1 :]
    return [], []


def _pre_name(tokenizer: Any) -> str:
    """Return the name of the rules by which a text is split before merging."""
    found = _rules(tokenizer)
    for name, family in FAMILIES.items():
        theirs = {
            "pre_tokenizer": family.pre_tokenizer,
            "normalizer": family.normalizer,
            "model": {"ignore_merges": family.ignore_merges},
        }
        if name != "default" and _rules(theirs) == found:
            return name
    raise _refused("its rules for splitting texts have no name there")


def _rules(tokenizer: Any) -> list[Any]:
    """Return the steps before merging, in a form that can be compared."""
    rules: list[Any] = [bool(tokenizer["model"].get("ignore_merges"))]
    for step in _flat(tokenizer.get("normalizer"), "normalizers"):
        rules.append(step.get("type"))
    for step in _flat(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        match step.get("type"):
            case "Split":
                rules.append((step["pattern"], step["behavior"], bool(step.get("invert"))))
            case "Digits":
                rules.append(("digits", bool(step.get("individual_digits"))))
            case "ByteLevel":
                by_regex = bool(step.get("use_regex", True))
                rules.append(("bytes", by_regex, bool(step.get("add_prefix_space"))))
            case other:
                rules.append(other)
    return rules


def _flat(step: Any, name: str) -> Iterator[Any]:
    """Yield the steps of a sequence, or the step itself."""
    if step:
        yield from step.get(name, [step])


def _check(found: Values, tokenizer: Any, merges: list[list[str]]) -> None:
    """Raise UnusableModel if the metadata would be read back as another tokenizer."""
    rebuilt = msgspec.json.decode(tokenizer_json(Fields(found, "the GGUF file")))
    if rebuilt["model"]["merges"] != merges:
        raise _refused("the order of its merges would change")
    if kinds(rebuilt["normalizer"]) != kinds(tokenizer.get("normalizer")):
        raise _refused("its normalizer would change")


def kinds(normalizer: Any) -> list[Any]:
    """Return the steps of a normalizer without empty sequences."""
    return [step for step in _flat(normalizer, "normalizers") if step.get("type")]


def _refused(reason: str) -> UnusableModel:
    return UnusableModel(f"a GGUF file cannot store this model's tokenizer: {reason}")
