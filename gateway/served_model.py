"""The served model: the engine's model card combined with the operator's options.

`ServedModel` is immutable. It is built once for a model and shared by all requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec

from gateway.formats.model_format import ModelOutputFormat, check_names
from gateway.images.model_images import ModelImages
from gateway.images.reader import ImageReader
from gateway.prompt.infill import InfillFormat, infill_format
from gateway.prompt.kwargs import effective_kwargs
from gateway.prompt.render import ChatRenderer
from gateway.prompt.template import TemplateLoader
from gateway.text.tokenizer import Tokenizer
from protocol.config.gateway import ModelConfig
from protocol.engine.messages import Limits
from protocol.engine.model_card import (
    ModelCard,
    SamplingDefaults,
    sampling_defaults,
    sets_penalty,
)
from protocol.wire.errors import InvalidRequest

log = logging.getLogger(__name__)


def version() -> str:
    """Return the version of the installed package, or "0+source" in a source tree."""
    try:
        return metadata.version("tidegate")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+source"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """Values for the sampling parameters that a request does not set: of --default-sampling, the
    model's files or the catalogue."""

    #: For most requests.
    usual: SamplingDefaults
    #: The same, without the penalties that the catalogue recommends against loops. They would
    #: change the most likely tokens, and the quotes and brackets of a long JSON value. They belong
    #: together, so who sets one of them gets none of the others.
    unpenalised: SamplingDefaults

    def for_request(
        self,
        temperature: float | None = None,
        *,
        is_free: bool = True,
        sets_penalty: bool = False,
    ) -> SamplingDefaults:
        """Return the values for a request.

        temperature    its temperature; None: it does not set one
        is_free        whether its answer is text in no prescribed form
        sets_penalty   whether it sets a penalty for the tokens so far
        """
        used = self.usual.temperature if temperature is None else temperature
        is_penalised = is_free and not sets_penalty and used != 0
        return self.usual if is_penalised else self.unpenalised


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The operator's options that change how a model is served."""

    #: Names of the model in the API; empty: the name in its model card.
    served_names: Sequence[str]
    #: Source text of a chat template; None: the model's own template is used.
    chat_template: str | None
    #: Default chat-template kwargs.
    template_kwargs: Mapping[str, Any]
    tool_format: str
    reasoning_format: str
    default_sampling: SamplingDefaults

    @classmethod
    def from_config(cls, config: ModelConfig, templates: TemplateLoader) -> ModelOptions:
        """Return the options in `config`, checked as far as possible without a model. Raises
        ValueError, naming the invalid option."""
        check_names(config.tool_format, config.reasoning_format)
        return cls(
            served_names=config.served_name,
            chat_template=_read_template(config.chat_template, templates)
            if config.chat_template
            else None,
            template_kwargs=_parse_template_kwargs(config.default_chat_template_kwargs),
            tool_format=config.tool_format,
            reasoning_format=config.reasoning_format,
            default_sampling=sampling_defaults(config.default_sampling),
        )

    def defaults_of(self, card: ModelCard) -> RequestDefaults:
        """Return the sampling parameters of requests that do not set them."""
        own = self.default_sampling.with_fallback(card.defaults)
        unpenalised = own.with_fallback(card.recommended.without_penalties())
        usual = unpenalised if sets_penalty(own) else own.with_fallback(card.recommended)
        return RequestDefaults(usual=usual, unpenalised=unpenalised)

    def effective_card(self, card: ModelCard) -> ModelCard:
        """Return `card` with the operator's chat template, if there is one."""
        if self.chat_template is None:
            return card
        return msgspec.structs.replace(
            card, chat_template=self.chat_template, tool_use_template=None
        )


def _read_template(path: str, templates: TemplateLoader) -> str:
    """Return the source of a chat template file after loading it once. Raises ValueError."""
    try:
        source = Path(path).read_text(encoding="utf-8")
        templates.load(source, {})
    except (OSError, ValueError) as error:
        raise ValueError(f"--chat-template {path}: {error}") from None
    return source


def _parse_template_kwargs(text: str) -> Mapping[str, Any]:
    """Return the JSON object in `text` after checking it. Raises ValueError."""
    option = "--default-chat-template-kwargs"
    try:
        kwargs = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
        effective_kwargs(server_defaults=kwargs)
    except (msgspec.DecodeError, InvalidRequest) as error:
        raise ValueError(f"{option}: {error}") from None
    return kwargs


@dataclass(frozen=True, slots=True)
class ModelText:
    """The parts of a served model that do not depend on its weights. Building them takes most of
    the preparation time, and needs no engine."""

    #: The card from which the parts are made.
    card: ModelCard
    tokenizer: Tokenizer
    renderer: ChatRenderer
    #: The formats by which the model's output is parsed.
    output_format: ModelOutputFormat
    #: How the model is prompted to fill in the middle; None if it has no tokens for that.
    infill: InfillFormat | None

    @classmethod
    def from_card(
        cls,
        card: ModelCard,
        options: ModelOptions,
        templates: TemplateLoader,
        images: ImageReader | None = None,
    ) -> ModelText:
        """Make the parts. Without `images`, requests with images are refused. Raises ValueError
        if the tokenizer or an option cannot be used."""
        effective = options.effective_card(card)
        tokenizer = Tokenizer(effective)
        placing = ModelImages(effective, tokenizer, images)
        renderer = ChatRenderer(effective, tokenizer, templates, placing)
        output_format = ModelOutputFormat(
            effective,
            tokenizer,
            options.tool_format,
            options.reasoning_format,
            teachable=renderer.omits_tools,
            written=renderer.written,
        )
        return cls(card, tokenizer, renderer, output_format, infill_format(card, tokenizer))

    def fits(self, card: ModelCard) -> bool:
        """Return whether `card` would give the same parts, because it differs from `self.card` only
        in fields that these parts do not read."""
        return _without_weights(card) == _without_weights(self.card)


def _without_weights(card: ModelCard) -> ModelCard:
    """Return `card` without the fields that no part of a ModelText reads."""
    return msgspec.structs.replace(
        card,
        digest="",
        defaults=SamplingDefaults(),
        recommended=SamplingDefaults(),
        dtype="",
        num_parameters=0,
        weights_bytes=0,
        license=None,
        numerics="",
    )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready to serve."""

    card: ModelCard
    limits: Limits
    #: The model's names in the API. The first one is its main name; the others are aliases.
    names: Sequence[str]
    tokenizer: Tokenizer
    renderer: ChatRenderer
    #: The formats by which the model's output is parsed.
    output_format: ModelOutputFormat
    #: How the model is prompted to fill in the middle; None if it has no tokens for that.
    infill: InfillFormat | None
    defaults: RequestDefaults
    #: Default chat-template kwargs.
    default_kwargs: Mapping[str, Any]
    #: The `system_fingerprint` of responses (`fingerprint_of`).
    fingerprint: str
    #: When the model was prepared, in seconds since 1970.
    created_at: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def from_card(
        cls, card: ModelCard, limits: Limits, options: ModelOptions, templates: TemplateLoader
    ) -> ServedModel:
        """Prepare a model. Raises ValueError if its tokenizer or an option cannot be used."""
        return cls.from_text(ModelText.from_card(card, options, templates), card, limits, options)

    @classmethod
    def from_text(
        cls, text: ModelText, card: ModelCard, limits: Limits, options: ModelOptions
    ) -> ServedModel:
        """Return the served model of `card`. `text.fits(card)` must be true."""
        card = options.effective_card(card)
        return cls(
            card=card,
            limits=limits,
            names=options.served_names or [card.name],
            tokenizer=text.tokenizer,
            renderer=text.renderer,
            output_format=text.output_format,
            infill=text.infill,
            defaults=options.defaults_of(card),
            default_kwargs=options.template_kwargs,
            fingerprint=fingerprint_of(card),
        )


Ability = Literal["generate", "embed", "score"]
"""An ability that a request requires its model to have."""
_ROUTES: dict[Ability, str] = {
    "generate": "chats and completions",
    "embed": "/v1/embeddings, /v1/rerank and /v1/score",
    "score": "/v1/rerank and /v1/score",
}
_OTHER_MODELS: dict[Ability, str] = {
    "generate": "",
    "embed": "; serve an embedding model, such as bge-small-en",
    "score": "; serve a reranker, such as bge-reranker-m3, or an embedding model",
}
"""The models that have an ability, with one of the catalogue, for a user whose model lacks it."""


def check_ability(card: ModelCard, ability: Ability, name: str) -> None:
    """Raise InvalidRequest, naming what the model can do, if it cannot do what a request needs.

    name  the model's name in the API
    """
    found: list[Ability] = ["generate"] if card.generates else []
    if card.encoding is not None:
        found.append(card.encoding.task)
    if ability in found or (ability == "score" and "embed" in found):
        return
    lacks = "does not generate text" if ability == "generate" else "has no embeddings"
    advice = _OTHER_MODELS[ability]
    if card.generates:
        advice += ", or this one with --pooling mean or --pooling last"
        lacks = "generates text, and has no embeddings"
    elif ability == "embed":
        lacks = "scores pairs of texts, and has no embeddings"
    serves = ", and ".join(_ROUTES[each] for each in found)
    raise InvalidRequest.at("model", f"{name!r} {lacks}; it serves {serves}{advice}")


def fingerprint_of(card: ModelCard) -> str:
    """Return the `system_fingerprint` of responses: our version, the start of the model's digest
    and `ModelCard.numerics`, which is empty if results are not reproducible."""
    numerics = f"-{card.numerics}" if card.numerics else ""
    return f"tidegate-{version()}-{card.digest[:8]}{numerics}"
