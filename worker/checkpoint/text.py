"""Reads the tokenizer, the templates and the sampling defaults for the gateway. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from protocol.engine.model_card import InfillTokens, SamplingDefaults
from worker.checkpoint.generation_config import FILE as GENERATION
from worker.checkpoint.generation_config import generation_defaults
from worker.errors import FETCH_AGAIN, UnusableModel
from worker.spec.fields import Fields, read_json

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the chat templates that are used: for conversations without and with tools. Templates
with other names are ignored."""


@dataclass(frozen=True, slots=True)
class TextFacts:
    """Tokenizer, templates and defaults. The fields mean the same as those of ModelCard."""

    #: Content of tokenizer.json.
    tokenizer: bytes
    #: Ids of the tokens that end an answer.
    eos_token_ids: list[int]
    #: Id of the token that starts a prompt, if there is one.
    bos_token_id: int | None = None
    #: Id of the padding token, which is never generated.
    pad_token_id: int | None = None
    #: Role, such as "bos_token" -> text of the token.
    special_tokens: dict[str, str] = field(default_factory=dict)
    #: Jinja source of the default template.
    chat_template: str | None = None
    #: Jinja source of the template for conversations with tools.
    tool_use_template: str | None = None
    #: JSON text that describes the format of the model's answers, if the files have one.
    response_template: str | None = None
    #: Recommended sampling parameters.
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    #: License of the model, if the files give one.
    license: str | None = None
    #: Tokens of fill-in-the-middle prompts that the files name.
    infill_tokens: InfillTokens = field(default_factory=InfillTokens)


TEMPLATE_JSON = "chat_template.json"
"""Some older models of images have their template only in this file."""
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def directory_name(path: Path) -> str:
    """Return the name of the model in a directory: the directory's own name.

    In the cache of the Hugging Face Hub, models--OWNER--REPO/snapshots/COMMIT, the model has the
    name of the repository.
    """
    found = path.resolve()
    repository = found.parent.parent.name
    if found.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return found.name


def directory_text(path: Path, config: Fields, vocab_size: int | None = None) -> TextFacts:
    """Return the tokenizer, templates and defaults of a Hugging Face directory.

    config       the fields of config.json; empty if there is none
    vocab_size   EOS ids must be below this; None skips the check

    Raises UnusableModel if there is no tokenizer.json, or if a file or a field is not valid.
    """
    if not (path / "tokenizer.json").is_file():
        raise UnusableModel(f"{path} has no tokenizer.json; other tokenizer formats are not read")
    tokenizer = (path / "tokenizer.json").read_bytes()
    ids = token_ids(read_json(path / "tokenizer.json"))
    settings = _optional_json(path / "special_tokens_map.json")
    settings |= _optional_json(path / "tokenizer_config.json")
    recommended = _optional_json(path / GENERATION)
    special = _special_tokens(settings)
    templates = _chat_templates(path, settings)
    ends = _id_list(Fields(recommended, GENERATION), "eos_token_id")
    ends = ends or _id_list(config, "eos_token_id")
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
        defaults=generation_defaults(recommended, vocab_size),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return token -> id of the vocabulary and the added tokens in a parsed tokenizer.json. Raises
    UnusableModel if an id is not an integer."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocab) if isinstance(vocab, dict) else {}
    if not all(type(token_id) is int for token_id in ids.values()):
        raise UnusableModel("tokenizer.json: an id in the vocabulary is not an integer")
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list):
        raise UnusableModel("tokenizer.json: 'added_tokens' is not a list")
    for token in map(_added_token, added):
        ids[token.text("content")] = token.integer("id")
    return ids


def _added_token(token: Any) -> Fields:
    return Fields(token, "an added token of tokenizer.json")


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return role -> text. In the files, a token is a string or an object with `content`."""
    found = {}
    for name in SPECIAL_TOKENS:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _id_list(fields: Fields, name: str) -> list[int]:
    """Return the ids in a field, which may hold one id or a list of ids, or be absent."""
    value = fields.get(name, [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UnusableModel(f"{name} {value!r:.80} is neither a token id nor a list of them")
    return list(ids)


def _chat_templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return name -> source of each chat template.

    If there are template files, the templates in tokenizer_config.json are ignored, and so is
    TEMPLATE_JSON if there is any other template, as in transformers.
    """
    files = {file.stem: file for file in sorted((path / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (path / TEMPLATE_FILE).is_file():
        files[DEFAULT] = path / TEMPLATE_FILE
    if files:
        return {name: _template_text(file) for name, file in files.items()}
    given = settings.get("chat_template") or _optional_json(path / TEMPLATE_JSON).get(
        "chat_template"
    )
    if isinstance(given, list):
        given = {item.get("name"): item.get("template") for item in given if isinstance(item, dict)}
    named = given if isinstance(given, dict) else {DEFAULT: given}
    return {name: source for name, source in named.items() if isinstance(source, str)}


def _template_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableModel(f"cannot read {file}: {error}", remedy=FETCH_AGAIN) from error


def _response_template(settings: dict[str, Any]) -> str | None:
    """Return the response template as JSON text. The gateway checks it."""
    given = settings.get("response_template")
    return None if given is None else json.dumps(given)


class Vocabulary(Protocol):
    """The part of a model's card or header that `check_draft` compares."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> bytes: ...


def check_draft(draft: Vocabulary, model: Vocabulary) -> None:
    """Raise UnusableModel if the draft model `draft` and `model` assign different ids to tokens."""
    if _tokens(draft) != _tokens(model):
        raise UnusableModel(
            f"the draft model {draft.name} and {model.name} have different vocabularies "
            f"({draft.vocab_size:,} and {model.vocab_size:,} ids); they must share a tokenizer",
            remedy="choose another --draft-model",
        )


def _tokens(card: Vocabulary) -> tuple[Any, dict[str, int]]:
    """Return everything in tokenizer.json that assigns ids: vocabulary and added tokens."""
    tokenizer = msgspec.json.decode(card.tokenizer)
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    return (tokenizer.get("model") or {}).get("vocab"), added
