"""Text side of a model, which its gateway needs: tokenizer, templates, defaults. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from protocol.model_card import SamplingDefaults
from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields, read_json

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of a model's chat templates; the second is for conversations with tools. A request cannot
select any other template."""


@dataclass(frozen=True, slots=True)
class TextFacts:
    """Tokenizer, templates and defaults; the fields mean the same as in ModelCard."""

    #: A tokenizer.json.
    tokenizer: bytes
    #: Tokens that end an answer.
    eos_token_ids: list[int]
    #: Token that starts a prompt, if there is one.
    bos_token_id: int | None = None
    #: Padding, which is never generated.
    pad_token_id: int | None = None
    #: Role, such as "bos_token" -> text.
    special_tokens: dict[str, str] = field(default_factory=dict)
    #: Jinja source of the default template.
    chat_template: str | None = None
    #: Jinja source of the template for conversations with tools.
    tool_use_template: str | None = None
    #: Template that describes the model's answers.
    response_template: str | None = None
    #: Recommended sampling parameters.
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    #: License of the model, if it is named.
    license: str | None = None


TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def directory_text(path: Path, config: Fields, vocab_size: int | None = None) -> TextFacts:
    """Return the tokenizer, templates and defaults of the directory.

    config       the fields of config.json; empty if there is none
    vocab_size   the limit of token ids; None skips that check
    """
    if not (path / "tokenizer.json").is_file():
        raise UnusableModel(f"{path} has no tokenizer.json; other tokenizer formats are not read")
    tokenizer = (path / "tokenizer.json").read_bytes()
    ids = token_ids(read_json(path / "tokenizer.json"))
    settings = _optional_json(path / "special_tokens_map.json")
    settings |= _optional_json(path / "tokenizer_config.json")
    generation = Fields(_optional_json(path / "generation_config.json"), "generation_config.json")
    special = _special_tokens(settings)
    templates = _chat_templates(path, settings)
    ends = _id_list(generation, "eos_token_id") or _id_list(config, "eos_token_id")
    if special.get("eos_token") in ids:
        ends.append(ids[special["eos_token"]])
    if vocab_size and (too_large := [end for end in ends if end >= vocab_size]):
        raise UnusableModel(
            f"eos_token_id {too_large[0]} is outside the vocabulary of {vocab_size:,}"
        )
    return TextFacts(
        tokenizer=tokenizer,
        eos_token_ids=list(dict.fromkeys(ends)),
        bos_token_id=ids.get(special.get("bos_token", "")),
        pad_token_id=ids.get(special.get("pad_token", "")),
        special_tokens=special,
        chat_template=templates.get(DEFAULT),
        tool_use_template=templates.get(TOOL_USE),
        response_template=_response_template(settings),
        defaults=_defaults(generation),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return token -> id, for the vocabulary and the added tokens."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocab) if isinstance(vocab, dict) else {}
    for token in map(_added_token, tokenizer.get("added_tokens") or []):
        ids[token.text("content")] = token.integer("id")
    return ids


def _added_token(token: Any) -> Fields:
    return Fields(token, "an added token of tokenizer.json")


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return special tokens by name. A file has each as a string or an object with `content`."""
    found = {}
    for name in SPECIAL_TOKENS:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _id_list(fields: Fields, name: str) -> list[int]:
    """Return the field as a list; the file has one id, a list of ids, or nothing."""
    value = fields.get(name, [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UnusableModel(f"{name} {value!r:.80} is neither a token id nor a list of them")
    return list(ids)


def _chat_templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return name -> source. Template files take precedence over tokenizer_config.json, as in
    transformers."""
    files = {file.stem: file for file in sorted((path / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (path / TEMPLATE_FILE).is_file():
        files[DEFAULT] = path / TEMPLATE_FILE
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    given = settings.get("chat_template")
    if isinstance(given, list):
        given = {item.get("name"): item.get("template") for item in given if isinstance(item, dict)}
    named = given if isinstance(given, dict) else {DEFAULT: given}
    return {name: source for name, source in named.items() if isinstance(source, str)}


def _response_template(settings: dict[str, Any]) -> str | None:
    """Return the template of tokenizer_config.json unchecked; the gateway's reader checks it."""
    given = settings.get("response_template")
    return None if given is None else json.dumps(given)


def _defaults(generation: Fields) -> SamplingDefaults:
    def number(name: str) -> float | None:
        return None if generation.get(name) is None else generation.number(name)

    top_k = generation.get("top_k")
    return SamplingDefaults(
        temperature=number("temperature"),
        top_p=number("top_p"),
        top_k=None if top_k is None else generation.integer("top_k"),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )


class Vocabulary(Protocol):
    """The part of a model's card or header that is compared."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> bytes: ...


def check_draft(draft: Vocabulary, model: Vocabulary) -> None:
    """Raise UnusableModel if `draft` cannot draft tokens for `model`."""
    if _tokens(draft) != _tokens(model):
        raise UnusableModel(
            f"the draft model {draft.name} and {model.name} have different vocabularies "
            f"({draft.vocab_size:,} and {model.vocab_size:,} ids); they must share a tokenizer",
            remedy="choose another --draft-model",
        )


def _tokens(card: Vocabulary) -> tuple[Any, dict[str, int]]:
    """Return all ids that tokenizer.json assigns: the vocabulary in its own form, and the added
    tokens."""
    tokenizer = msgspec.json.decode(card.tokenizer)
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    return tokenizer["model"].get("vocab"), added
