"""Metadata of a tokenizer in a GGUF file: the inverse of `checkpoint.gguf_tokenizer`.

A GGUF file does not store the rules by which a text is split before merging, only a name for them.
A tokenizer whose rules have no name is refused, and so is one that would be read back from the file
as a different tokenizer. The original and the one read back are compared part by part, because the
library that could encode texts with them runs in the gateway. Differences that cannot change an id
or an answer are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from worker.checkpoint.gguf_roles import END_KEYS, END_TEXTS
from worker.checkpoint.gguf_tokenizer import FAMILIES, tokenizer_json
from worker.checkpoint.gguf_tokens import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from worker.checkpoint.text import TOOL_USE, TextFacts, token_ids
from worker.errors import UnusableModel
from worker.spec.fields import Fields

Values = dict[str, Any]
PREFIX = "tokenizer.ggml."
BYTE_LETTERS = frozenset(map(chr, (*range(33, 127), *range(161, 173), *range(174, 324))))
"""Characters that stand for the 256 bytes in byte-level BPE."""
MATCHING = ("special", "lstrip", "rstrip", "single_word")
"""Flags of an added token that always have an effect."""
OPTIONS = (
    "ignore_merges",
    "byte_fallback",
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)
"""Options of a BPE model that always have an effect, unless they are empty."""


def tokenizer_metadata(text: TextFacts, vocab_size: int) -> Values:
    """Return the metadata of the tokenizer, the templates and the sampling defaults.

    Raises UnusableModel if a GGUF file cannot store them.
    """
    tokenizer = msgspec.json.decode(text.tokenizer)
    model = tokenizer.get("model") or {}
    if model.get("type", "BPE") != "BPE":
        raise _refused(f"its model is {model.get('type')!r:.40}, not BPE")
    kind = "llama" if model.get("byte_fallback") else "gpt2"
    merges = _merges(model)
    tokens, types = _tokens(tokenizer, vocab_size, kind)
    before, after = _markers(tokenizer.get("post_processor"))
    bos = text.special_tokens.get("bos_token")
    ends = _ends(text, tokens)
    eos = tokens[ends["eos"]] if ends else None
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
    found |= _ids(text, ends) | _texts(text)
    _check(found, tokenizer, merges)
    return found


def _merges(model: Any) -> list[list[str]]:
    """Return the pairs of pieces that are merged, best first."""
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise _refused("its model has no list of merges")
    pairs = [each.split(" ") if isinstance(each, str) else each for each in merges]
    for pair in pairs:
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(piece, str) for piece in pair):
            raise _refused(f"{pair!r:.40} among its merges is not a pair of pieces")
    return pairs


def _tokens(tokenizer: Any, vocab_size: int, kind: str) -> tuple[list[str], list[int]]:
    """Return the tokens in the order of their ids, and their types. An id without a token gets a
    name such as [PAD7]."""
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
    """Return the metadata of a SentencePiece tokenizer.

    Pieces of earlier merges have higher scores. Pieces that no merge makes have the lowest score.
    """
    rank: dict[str, int] = {}
    for left, right in merges:
        rank.setdefault(left + right, len(rank))
    normalizer = tokenizer.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    unknown = tokenizer["model"].get("unk_token") or tokens[0]
    if unknown not in tokens:
        raise _refused(f"its unknown token {unknown!r:.40} is not in the vocabulary")
    return {
        f"{PREFIX}pre": "default",
        f"{PREFIX}scores": [-float(rank.get(token, len(rank))) for token in tokens],
        f"{PREFIX}add_space_prefix": any(step.get("type") == "Prepend" for step in steps),
        f"{PREFIX}unknown_token_id": tokens.index(unknown),
    }


def _ends(text: TextFacts, tokens: list[str]) -> dict[str, int]:
    """Return role -> id of the tokens that end an answer.

    The tokenizer's own EOS token comes first, because templates get the text of the first one.
    Tokens that readers find by their texts come last, because they need no place in the file.
    """
    own = text.special_tokens.get("eos_token")
    ends = sorted(
        text.eos_token_ids, key=lambda end: (tokens[end] != own, tokens[end] in END_TEXTS)
    )
    if beyond := [end for end in ends[len(END_KEYS) :] if tokens[end] not in END_TEXTS]:
        needed = [*ends[: len(END_KEYS)], *beyond]
        names = ", ".join(repr(tokens[end]) for end in needed)
        raise UnusableModel(
            f"a GGUF file cannot store {len(needed)} tokens that end an answer, only "
            f"{len(END_KEYS)}: {names}",
            remedy="remove those that the model does not need from eos_token_id in "
            "generation_config.json",
        )
    return dict(zip(END_KEYS, ends, strict=False))


def _ids(text: TextFacts, ends: dict[str, int]) -> Values:
    ids = {"bos": text.bos_token_id, "padding": text.pad_token_id, **ends}
    return {f"{PREFIX}{name}_token_id": each for name, each in ids.items() if each is not None}


def _texts(text: TextFacts) -> Values:
    """Return the templates, the license and the sampling defaults. Raises UnusableModel, naming a
    default, if a GGUF file cannot store it."""
    defaults = text.defaults
    words = defaults.bad_words_ids or []
    for name, is_stored in (
        ("min_new_tokens", not defaults.min_tokens),
        ("sequence_bias", not defaults.logit_bias),
        ("bad_words_ids of several tokens", all(len(word) == 1 for word in words)),
    ):
        if not is_stored:
            raise UnusableModel(
                f"a GGUF file cannot store the {name} of generation_config.json",
                remedy="remove it from a copy of the file",
            )
    found = {
        "tokenizer.chat_template": text.chat_template,
        f"tokenizer.chat_template.{TOOL_USE}": text.tool_use_template,
        "general.license": text.license,
        "general.sampling.temp": defaults.temperature,
        "general.sampling.top_p": defaults.top_p,
        "general.sampling.top_k": defaults.top_k,
        "general.sampling.min_p": defaults.min_p,
        "general.sampling.penalty_repeat": defaults.repetition_penalty,
        f"{PREFIX}suppress_tokens": [word[0] for word in words] or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _markers(processor: Any) -> tuple[list[str], list[str]]:
    """Return the tokens that are added before and after a text."""
    parts = [part.get("SpecialToken", {}).get("id") for part in _template(processor)]
    if not parts:
        return [], []
    if parts.count(None) != 1:
        raise _refused("the template of its post-processor does not have the text exactly once")
    middle = parts.index(None)
    return parts[:middle], parts[middle + 1 :]


def _template(processor: Any) -> list[Any]:
    """Return the template of a single text; empty if there is none.

    A ByteLevel step is ignored: it changes offsets, but no ids.
    """
    steps = [step for step in _flat(processor, "processors") if step.get("type") != "ByteLevel"]
    match steps:
        case []:
            return []
        case [{"type": "TemplateProcessing", "single": [_, *_] as template}]:
            return list(template)
    names = ", ".join(str(step.get("type")) for step in steps)
    raise _refused(f"its post-processor ({names:.80}) is not a single template")


def _added_ids(processor: Any) -> list[Any]:
    """Return the ids of each part of the template of a single text; None for the text itself.

    Return [] for a template that consists of the text alone, as if there were no template.
    """
    steps = _flat(processor, "processors")
    named = {name: each for step in steps for name, each in step.get("special_tokens", {}).items()}
    tokens = (part.get("SpecialToken", {}).get("id") for part in _template(processor))
    ids = [named[token].get("ids") if token in named else None for token in tokens]
    return [] if ids == [None] else ids


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
    """Return the steps before merging, in a form that can be compared.

    A split at spaces is left out if the normalizer replaces all spaces.
    """
    rules: list[Any] = [bool(tokenizer["model"].get("ignore_merges"))]
    spaces = {"String": " "}
    without_spaces = False
    for step in _flat(tokenizer.get("normalizer"), "normalizers"):
        rules.append(step.get("type"))
        without_spaces |= step.get("type") == "Replace" and step.get("pattern") == spaces
    for step in _flat(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        match step.get("type"):
            case "Split" if without_spaces and step["pattern"] == spaces:
                pass
            case "Split":
                pattern = _spelled(step["pattern"])
                rules.append((pattern, step["behavior"], bool(step.get("invert"))))
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
    _check_ids(rebuilt, tokenizer)
    _check_added_tokens(_added_tokens(rebuilt), _added_tokens(tokenizer))
    options, wanted = _options(rebuilt), _options(tokenizer)
    for name in wanted:
        if options.get(name) != wanted[name]:
            raise _refused(f"{name} of its model is {wanted[name]!r:.40}")
    if _steps(rebuilt["normalizer"], "normalizers") != _steps(
        tokenizer.get("normalizer"), "normalizers"
    ):
        raise _refused("its normalizer would change")
    if _rules(rebuilt) != _rules(tokenizer):
        raise _refused("its rules for splitting texts would change")
    if _decoding(rebuilt["decoder"]) != _decoding(tokenizer.get("decoder")):
        raise _refused("its decoder would change")
    if _added_ids(rebuilt["post_processor"]) != _added_ids(tokenizer.get("post_processor")):
        raise _refused("the ids that it adds to texts would change")


def _check_ids(rebuilt: Any, tokenizer: Any) -> None:
    """Raise UnusableModel if a token would get another id.

    A piece that has the same id as an added token is not stored. The merges do not need it.
    """
    ids = token_ids(rebuilt)
    added = {each["id"] for each in tokenizer.get("added_tokens") or []}
    for token, index in token_ids(tokenizer).items():
        if ids.get(token) != index and index not in added:
            raise _refused(f"token {token!r:.40} would not have the id {index}")


def _check_added_tokens(found: dict[Any, Values], wanted: dict[Any, Values]) -> None:
    """Raise UnusableModel, naming a token, if the added tokens or their flags would change. Added
    tokens are matched before merging."""
    for index, content in wanted:
        if (index, content) not in found:
            raise _refused(f"its added token {content!r:.40} would be lost")
    for (index, content), flags in found.items():
        if (index, content) not in wanted:
            raise _refused(f"its token {content!r:.40} would become an added token")
        for name, value in wanted[index, content].items():
            if flags[name] != value:
                raise _refused(f"{name} of its added token {content!r:.40} is {value}")


def _added_tokens(tokenizer: Any) -> dict[Any, Values]:
    """Return (id, content) -> flags of each added token.

    `normalized` has no effect without a normalizer, and is left out then.
    """
    normalizes = bool(_steps(tokenizer.get("normalizer"), "normalizers"))
    names = (*MATCHING, "normalized") if normalizes else MATCHING
    return {
        (each["id"], each["content"]): {name: bool(each.get(name)) for name in names}
        for each in tokenizer.get("added_tokens") or []
    }


def _options(tokenizer: Any) -> Values:
    """Return the options of a tokenizer.json's `model` that change the tokens of any text.

    The options of the unknown token have no effect if there is a token for every byte.
    """
    model = tokenizer["model"]
    fallback = {f"<0x{byte:02X}>" for byte in range(256)}
    all_bytes = fallback if model.get("byte_fallback") else BYTE_LETTERS
    unknown = () if all_bytes <= model["vocab"].keys() else ("unk_token", "fuse_unk")
    return {name: model.get(name) or None for name in (*OPTIONS, *unknown)}


def _decoding(decoder: Any) -> list[Any]:
    """Return the steps of a decoder. The options of ByteLevel have no effect on decoding."""
    steps = _steps(decoder, "decoders")
    return ["ByteLevel" if step["type"] == "ByteLevel" else step for step in steps]


def _steps(whole: Any, name: str) -> list[Any]:
    """Return the steps of `whole`, which is None, a step, or a sequence with the key `name`."""
    return [step for step in _flat(whole, name) if step.get("type")]


def _refused(reason: str) -> UnusableModel:
    return UnusableModel(f"a GGUF file cannot store this model's tokenizer: {reason}")


def _spelled(pattern: Any) -> Any:
    """Return a pattern in which the ends of lines are spelled as escapes. DeepSeek's has them as
    characters, which mean the same."""
    if not isinstance(pattern, dict) or not isinstance(pattern.get("Regex"), str):
        return pattern
    return {"Regex": pattern["Regex"].replace("\r", r"\r").replace("\n", r"\n")}
