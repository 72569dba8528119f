"""The served model: the engine's model card combined with the operator's options.

It is built once per model, shared by all requests, and immutable.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from gateway.formats.model_format import ModelOutputFormat, check_names
from gateway.prompt.kwargs import effective_kwargs
from gateway.prompt.render import ChatRenderer
from gateway.prompt.template import TemplateLoader
from gateway.text.tokenizer import Tokenizer
from protocol.config.gateway import GatewayConfig
from protocol.errors import InvalidRequest
from protocol.messages import Limits
from protocol.model_card import ModelCard, SamplingDefaults, sampling_defaults
from protocol.sampling import SamplingParams

log = logging.getLogger(__name__)


def version() -> str:
    try:
        return metadata.version("tidegate")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+source"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The operator's options for any model, checked as far as possible without a model.

    chat_template  source text; None: the model's own template
    """

    served_names: Sequence[str]
    chat_template: str | None
    template_kwargs: Mapping[str, Any]
    tool_format: str
    reasoning_format: str
    default_sampling: SamplingDefaults

    @classmethod
    def of(cls, config: GatewayConfig, templates: TemplateLoader) -> ModelOptions:
        """Raises ValueError, naming the invalid option."""
        check_names(config.tool_format, config.reasoning_format)
        return cls(
            served_names=config.served_name,
            chat_template=_template_in(config.chat_template, templates)
            if config.chat_template
            else None,
            template_kwargs=_template_kwargs(config.default_chat_template_kwargs),
            tool_format=config.tool_format,
            reasoning_format=config.reasoning_format,
            default_sampling=sampling_defaults(config.default_sampling),
        )


def _template_in(path: str, templates: TemplateLoader) -> str:
    try:
        source = Path(path).read_text(encoding="utf-8")
        templates.load(source, {})
    except (OSError, ValueError) as error:
        raise ValueError(f"--chat-template {path}: {error}") from None
    return source


def _template_kwargs(text: str) -> Mapping[str, Any]:
    option = "--default-chat-template-kwargs"
    try:
        kwargs = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
        effective_kwargs(server_defaults=kwargs)
    except (msgspec.DecodeError, InvalidRequest) as error:
        raise ValueError(f"{option}: {error}") from None
    return kwargs


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready to serve."""

    card: ModelCard
    limits: Limits
    #: Names in the API; the first is its name, the others are aliases.
    names: Sequence[str]
    tokenizer: Tokenizer
    renderer: ChatRenderer
    #: How its output is parsed.
    output_format: ModelOutputFormat
    #: Sampling parameters that a request does not set: --default-sampling's, else the model's own.
    defaults: SamplingDefaults
    #: Default chat-template kwargs.
    default_kwargs: Mapping[str, Any]
    fingerprint: str
    since: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(
        cls, card: ModelCard, limits: Limits, options: ModelOptions, templates: TemplateLoader
    ) -> ServedModel:
        """Raises ValueError if the tokenizer, or an option with this model, cannot be used."""
        if options.chat_template is not None:
            card = msgspec.structs.replace(
                card, chat_template=options.chat_template, tool_use_template=None
            )
        tokenizer = Tokenizer(card)
        renderer = ChatRenderer(card, tokenizer, templates)
        return cls(
            card=card,
            limits=limits,
            names=options.served_names or [card.name],
            tokenizer=tokenizer,
            renderer=renderer,
            output_format=ModelOutputFormat(
                card,
                tokenizer,
                options.tool_format,
                options.reasoning_format,
                teachable=renderer.writes_no_tools,
            ),
            defaults=options.default_sampling.with_fallback(usable_defaults(card.defaults)),
            default_kwargs=options.template_kwargs,
            fingerprint=f"tidegate-{version()}-{card.digest[:8]}",
        )


def usable_defaults(defaults: SamplingDefaults) -> SamplingDefaults:
    """Return a model's defaults without values that are invalid in a request."""
    return SamplingDefaults(
        **{
            name: value
            for name, value in msgspec.structs.asdict(defaults).items()
            if value is not None and _is_valid(name, value)
        }
    )


def _is_valid(name: str, value: float) -> bool:
    try:
        msgspec.convert({name: value}, SamplingParams)
    except msgspec.ValidationError as error:
        log.warning("ignoring the model's default %s=%r: %s", name, value, error)
        return False
    return True
