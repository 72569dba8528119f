"""What all routes share: the engine, the served model, the metrics, and whether we are ready.

One `Service` per process, made by `app.create_app` and handed to every blueprint; there is no other
place where state lives.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import gevent
import msgspec
from gevent import get_hub

from gateway.answering import Answer, Ask
from gateway.chat.kwargs import effective_kwargs
from gateway.chat.render import ChatRenderer
from gateway.chat.template import ChatTemplate
from gateway.connection import IdleConnections
from gateway.engine_client import EngineClient
from gateway.metrics import Metrics
from gateway.reading import NO_READING, Reading
from gateway.text.tokenizer import Tokenizer
from protocol.config import GatewayConfig
from protocol.errors import Draining, EngineNotReady, InvalidRequest, ServingError, UnknownModel
from protocol.messages import Limits
from protocol.model_card import ModelCard, SamplingDefaults
from protocol.sampling import SamplingParams
from protocol.session import PING_EVERY_S
from protocol.sockets import engine_address

log = logging.getLogger(__name__)

WATCH_S = 0.1
FRESH_S = 3 * PING_EVERY_S
"""A heartbeat is older than this: not ready, though the lease may still hold."""


def version() -> str:
    try:
        return metadata.version("tidegate")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+source"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What the operator says of the model, whichever it is; checked as far as it can be without
    one.

    chat_template  source; None: the model's own
    """

    served_names: Sequence[str]
    chat_template: str | None
    template_kwargs: Mapping[str, Any]
    tool_format: str
    reasoning_format: str

    @classmethod
    def of(cls, config: GatewayConfig) -> ModelOptions:
        """Raises ValueError, saying which option is wrong."""
        return cls(
            served_names=config.served_name,
            chat_template=_template_in(config.chat_template) if config.chat_template else None,
            template_kwargs=_template_kwargs(config.default_chat_template_kwargs),
            tool_format=config.tool_format,
            reasoning_format=config.reasoning_format,
        )


def _template_in(path: str) -> str:
    try:
        source = Path(path).read_text(encoding="utf-8")
        ChatTemplate(source)
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
    """A model card made usable: once per model, shared by all requests.

    names           what the API calls it; the first is its name, the others are aliases
    reading         how its answers are read
    default_kwargs  what its template is told where a request says nothing
    """

    card: ModelCard
    limits: Limits
    names: Sequence[str]
    tokenizer: Tokenizer
    renderer: ChatRenderer
    reading: Reading
    defaults: SamplingDefaults
    default_kwargs: Mapping[str, Any]
    fingerprint: str
    since: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, card: ModelCard, limits: Limits, options: ModelOptions) -> ServedModel:
        """Raises ValueError where the card's tokenizer, or an option, cannot be used with it."""
        if options.chat_template is not None:
            card = msgspec.structs.replace(card, chat_template=options.chat_template)
        tokenizer = Tokenizer(card)
        return cls(
            card=card,
            limits=limits,
            names=options.served_names or [card.name],
            tokenizer=tokenizer,
            renderer=ChatRenderer(card, tokenizer),
            reading=NO_READING,
            defaults=usable_defaults(card.defaults),
            default_kwargs=options.template_kwargs,
            fingerprint=f"tidegate-{version()}-{card.digest[:8]}",
        )


def usable_defaults(defaults: SamplingDefaults) -> SamplingDefaults:
    """A model's defaults without those that no request could ask for either."""
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
        log.warning("the model's default %s=%r is left out: %s", name, value, error)
        return False
    return True


def offload(work: Callable[[], list[int]]) -> list[int]:
    """Run in gevent's thread pool; other greenlets go on meanwhile."""
    result: list[int] = get_hub().threadpool.apply(work)
    return result


class Service:
    """is_draining   whether this process is on its way out; set by whoever runs it"""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.options = ModelOptions.of(config)
        self.engine = EngineClient(config.engine or engine_address(config.port))
        self.metrics = Metrics(
            is_up=lambda: self.engine.session.is_ready, stats=lambda: self.engine.stats
        )
        self.is_draining: Callable[[], bool] = lambda: False
        self.idle_connections = IdleConnections()
        self._answers: set[Answer] = set()
        self._watch: gevent.Greenlet[..., None] | None = None
        self._served: ServedModel | None = None
        self._served_card: ModelCard | None = None

    def start(self) -> None:
        """Begin to live, once: in the process that serves, after any fork."""
        if self._watch is None:
            self.engine.start()
            self._watch = gevent.spawn(self._keep_watch)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.kill()
        self.engine.close()

    def _keep_watch(self) -> None:
        """Prepare a model as soon as the engine tells of it, not when the first request comes; see
        a drain to its end."""
        draining_since: float | None = None
        while True:
            gevent.sleep(WATCH_S)
            self.trouble()
            if not self.is_draining():
                continue
            draining_since = draining_since or time.monotonic()
            self.idle_connections.close()
            if time.monotonic() - draining_since >= self.config.drain_s:
                self._end_answers()

    def _end_answers(self) -> None:
        for answer in list(self._answers):
            answer.fail(Draining("this server was shut down before the answer was complete"))

    def model(self, name: str | None = None) -> ServedModel:
        """Raises EngineNotReady, EngineLost or Draining where nothing can be served now, and
        UnknownModel where we serve none of that name. No name means the one that is served."""
        trouble = self.trouble()
        if trouble is not None:
            raise trouble
        served = self._current()
        if name is not None and name not in served.names:
            raise UnknownModel(
                f"the model {name!r} does not exist; this server has {', '.join(served.names)}",
                param="model",
            )
        return served

    def trouble(self) -> ServingError | None:
        """Why nothing can be served now; None when all is well. A fresh exception each time."""
        if self.is_draining():
            return Draining("this server is shutting down", retry_after_s=1)
        trouble = self.engine.trouble()
        if trouble is not None:
            return type(trouble)(f"the engine is not ready: {trouble.message}", retry_after_s=1)
        try:
            self._current()
        except ValueError as error:
            log.error("the engine's model cannot be served: %s", error)
            return EngineNotReady("the engine's model cannot be served by this gateway")
        return None

    def _current(self) -> ServedModel:
        """Made anew with each Welcome: the engine may have come back with another model."""
        card, limits = self.engine.session.model, self.engine.session.limits
        assert card is not None
        assert limits is not None
        served = self._served
        if served is None or served.limits is not limits or self._served_card is not card:
            self._served_card = card
            started_at = time.monotonic()
            served = self._served = ServedModel.of(card, limits, self.options)
            took_s = time.monotonic() - started_at
            log.info("serving %s after %.2f s of preparation", served.names[0], took_s)
        return served

    def answer(self, asks: Sequence[Ask], *, namespace: str, priority: int) -> Answer:
        """A new answer, not yet opened; `forget` it when it is over."""
        answer = Answer(self.engine, asks, namespace=namespace, priority=priority)
        self._answers.add(answer)
        return answer

    def forget(self, answer: Answer) -> None:
        self._answers.discard(answer)

    def readiness(self) -> tuple[bool, dict[str, object]]:
        """Whether to send us requests, and the facts behind it."""
        trouble = self.trouble()
        silence_s = self.engine.silence_s
        why = trouble.message if trouble is not None else None
        if why is None and silence_s is not None and silence_s > FRESH_S:
            why = f"the engine has been silent for {silence_s:.1f} s"
        facts: dict[str, object] = {
            "ready": why is None,
            "why": why,
            "gateway": {"pid": os.getpid(), "draining": self.is_draining()},
            "engine": {
                "epoch": self.engine.session.epoch,
                "silence_s": None if silence_s is None else round(silence_s, 3),
            },
        }
        return why is None, facts
