"""The state that all routes share: engine client, served model, metrics and readiness.

`app.create_app` creates one `Service` per process and passes it to every view. The routes share no
other state.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Unpack

import gevent
from gevent import get_hub
from gevent.lock import Semaphore

from gateway.auth.keys import KeyWatch
from gateway.context import RequestContext
from gateway.engine.base import EngineClient, NullEngineClient
from gateway.engine.client import ZmqEngineClient
from gateway.engine.disaggregated import DisaggregatedClient
from gateway.engine.refusal_cache import RefusalCache
from gateway.formats.model_format import WrongOption
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import PromptRequest
from gateway.generation.timeline import Timeline
from gateway.http.body import BodyReader
from gateway.http.client_socket import NOT_GUNICORN, IdleConnections, describe_writing
from gateway.http.json_size import MAX_TOKEN_IDS, JsonBounds
from gateway.http.sse import LAST_EVENT_HEADER
from gateway.observe.metrics import Metrics
from gateway.observe.tracing import tracing_to
from gateway.sandbox.clients import TemplateProcesses, trial_process, try_tokenizer
from gateway.served_model import ModelOptions, ModelText, ServedModel, return_free_memory
from gateway.store.database import Interrupt
from gateway.store.runs import Persistence
from gateway.threads import result_of
from protocol.cluster_key import read_cluster_key
from protocol.config.gateway import GatewayConfig
from protocol.errors import Draining, EngineLost, EngineNotReady, ServingError, UnknownModel
from protocol.exit_codes import ExitCode
from protocol.messages import Account, Limits
from protocol.model_card import ModelCard, read_card
from protocol.session import GenerateOptions
from protocol.sockets import engine_address

log = logging.getLogger(__name__)

WATCH_S = 0.1
"""Interval of the checks in `Service._keep_watch`."""
KEYS_POLL_S = 1.0
"""Interval at which the file of API keys is checked for changes."""


def offload(work: Callable[[], list[int]]) -> list[int]:
    """Run `work` in gevent's thread pool and return its result. Other greenlets run meanwhile."""
    return result_of(get_hub().threadpool, work)


def _engine_client(config: GatewayConfig, metrics: Metrics) -> EngineClient:
    """Return the client for the configured engines. Raises ValueError if an option is invalid."""
    if config.card:
        return NullEngineClient(config.card)
    key = read_cluster_key(config.cluster_key)
    client = partial(ZmqEngineClient, key=key, on_wire_error=metrics.wire_errors.inc)
    if config.decode:
        return DisaggregatedClient(
            [client(address) for address in config.prefill],
            [client(address) for address in config.decode],
            min_tokens=config.split_min_tokens,
            recomputes=config.kv_on_failure == "recompute",
            on_handover=metrics.handovers.inc,
            on_fallback=lambda cause: metrics.fallbacks.labels(cause).inc(),
        )
    return client(config.engine or engine_address(config.port))


class Service:
    """The state that all routes of one process share.

    interrupt  maps each kind of detached run to the function that writes the run's end if the
               process that generated the run has died

    The constructor raises ValueError if an option of `config` is invalid.
    """

    def __init__(self, config: GatewayConfig, interrupt: Mapping[str, Interrupt]) -> None:
        self.config = config
        self.templates = TemplateProcesses()
        self.options = ModelOptions.from_config(config, self.templates)
        self.bodies = BodyReader(config.max_body_mib << 20)
        self.keys = KeyWatch(config)
        self.metrics = Metrics(lambda: self.engine.connections, self._model_name)
        self.engine: EngineClient = _engine_client(config, self.metrics)
        #: Returns whether this process is shutting down. The server that runs it (gunicorn) sets
        #: this attribute and the next three.
        self.is_draining: Callable[[], bool] = lambda: False
        #: Whether open answers end now, with an error, instead of continuing for `drain_s`.
        self.ends_at_once = False
        #: Called with a reason and an exit code if the first model cannot be served. The code None
        #: means gunicorn's own exit code.
        self.give_up: Callable[[str, ExitCode | None], None] = lambda why, code: None
        #: Why streams are not written directly to the clients' sockets; None if they are.
        self.obstacle: str | None = NOT_GUNICORN
        self.tracing = tracing_to(config.otlp_traces_endpoint, self._model_name)
        self.idle_connections = IdleConnections()
        self.persistence = Persistence.from_config(config, interrupt)
        self.started_at = time.monotonic()
        self._groups: set[ChoiceGroup] = set()
        self._refusal_cache = RefusalCache()
        self._watch: gevent.Greenlet[..., None] | None = None
        self._preparing = Semaphore(1)
        self._trial = trial_process()
        #: The newest text side: that of the served model, or of the model being loaded.
        self._text: ModelText | None = None
        self._served: ServedModel | None = None
        self._served_card: ModelCard | None = None
        self._unservable: tuple[ModelCard, ValueError] | None = None

    def start(self) -> None:
        """Start the sandbox processes, the engine client, and the greenlet that checks the engine's
        state. Call this after the fork. Later calls have no effect."""
        if self._watch is None:
            self.templates.start()
            if not self.config.tried_tokenizer:
                self._trial.start()
            self.engine.start()
            self._watch = gevent.spawn(self._keep_watch)
            if self.config.expected_card:
                gevent.spawn(self._prepare_expected)

    def _prepare_expected(self) -> None:
        """Prepare the text side of the model that the engine is loading. If that fails, the model
        is prepared when the engine reports it, and the error is reported then."""
        with self._preparing, contextlib.suppress(ValueError):
            card = read_card(self.config.expected_card).card
            if self._text is None and self._is_tried(card.tokenizer):
                self._text = ModelText.from_card(card, self.options, self.templates)

    def close(self) -> None:
        """Wait until detached generations have ended, then close everything. Outside a drain,
        detached generations are ended at once.

        The server calls this after all its connections have ended.
        """
        if self.persistence is not None:
            while self.persistence.is_busy and self._watch is not None:
                if not self.is_draining():
                    self._end_groups()
                gevent.sleep(WATCH_S)
        if self._watch is not None:
            self._watch.kill()
        if self.persistence is not None:
            self.persistence.close()
        self.engine.close()
        self.templates.close()
        self._trial.close()
        if self.tracing is not None:
            self.tracing.close()

    def _keep_watch(self) -> None:
        """Prepare a new model before the first request, reload keys, and end a drain in time. This
        runs in a greenlet of its own."""
        draining_since: float | None = None
        polled_at = time.monotonic()
        while True:
            gevent.sleep(WATCH_S)
            self.trouble()  # prepares the model if the engine has reported a new one
            if time.monotonic() - polled_at >= KEYS_POLL_S:
                polled_at = time.monotonic()
                self.keys.poll()
            if not self.is_draining():
                continue
            draining_since = draining_since or time.monotonic()
            self.idle_connections.close()
            if self.ends_at_once or time.monotonic() - draining_since >= self.config.drain_s:
                self._end_groups()

    def _end_groups(self) -> None:
        for group in list(self._groups):
            group.fail(self._shutdown_error())

    def _shutdown_error(self) -> ServingError:
        """Return the error that ends an open answer when this process shuts down."""
        if not self.ends_at_once:
            return Draining("this server was shut down before the answer was complete")
        for connection in self.engine.connections:
            if isinstance(trouble := connection.client.trouble(), EngineLost):
                which = f"{connection.role} engine" if connection.role else "engine"
                return EngineLost(f"the server stops: the {which} was lost: {trouble.message}")
        return Draining("the server stops after a failure, before the answer was complete")

    def model(self, name: str | None = None) -> ServedModel:
        """Return the served model. Raises EngineNotReady, EngineLost or Draining if nothing can be
        served now. Raises UnknownModel if `name` is not None and not one of the model's names."""
        trouble = self.trouble()
        if trouble is not None:
            raise trouble
        served = self._current_model()
        if name is not None and name not in served.names:
            raise UnknownModel(
                f"the model {name!r} does not exist; this server serves {', '.join(served.names)}",
                param="model",
            )
        return served

    def trouble(self) -> ServingError | None:
        """Return the error that every request would get now, or None if requests can be served. If
        the engine has reported a new model, prepare it first."""
        if self.is_draining():
            return Draining("this server is shutting down", retry_after_s=1)
        trouble = self.engine.trouble()
        if trouble is not None:
            why = f"the engine is not ready: {trouble.message}"
            return type(trouble)(why, retry_after_s=trouble.retry_after_s or 1)
        try:
            self._current_model()
        except ValueError:
            return EngineNotReady("the engine's model cannot be served by this gateway")
        return None

    def _current_model(self) -> ServedModel:
        """Return the served model, prepared from the engine's last Welcome message.

        A new Welcome may have another model, because the engine may have restarted with one. Raises
        ValueError if the model cannot be served.
        """
        card, limits = self.engine.model, self.engine.limits
        assert card is not None
        assert limits is not None
        with self._preparing:  # loading a template switches greenlets
            return self._prepare_once(card, limits)

    def _prepare_once(self, card: ModelCard, limits: Limits) -> ServedModel:
        """Prepare the model unless that was done before. Return it, or raise the same error again.
        So a model that cannot be served is prepared and logged only once, not at each request."""
        if self._unservable is not None and self._unservable[0] is card:
            raise self._unservable[1]
        served = self._served
        if served is None or served.limits is not limits or self._served_card is not card:
            served = self._served = self._prepare(card, limits)
            self._served_card = card
        return served

    @property
    def has_served(self) -> bool:
        """Whether a model has become available since the start."""
        return self._served is not None

    def _model_name(self) -> str:
        """Return the main name of the model that was prepared last, or "" if there is none."""
        return self._served.names[0] if self._served is not None else ""

    def _prepare(self, card: ModelCard, limits: Limits) -> ServedModel:
        """Return a new served model, and log its formats. Raises ValueError."""
        started_at = time.monotonic()
        try:
            self._try_tokenizer(card.tokenizer)
            if self._text is None or not self._text.fits(card):
                self._text = ModelText.from_card(card, self.options, self.templates)
            served = ServedModel.from_text(self._text, card, limits, self.options)
        except ValueError as error:
            self._unservable = card, error
            log.error("the engine's model cannot be served: %s", error)
            if self._served is None:
                code = None if isinstance(error, WrongOption) else ExitCode.BAD_MODEL
                self.give_up(str(error), code)
            raise
        return_free_memory()
        log.info(
            "serving %s after %.2f s of preparation; formats: %s; %s",
            served.names[0],
            time.monotonic() - started_at,
            served.output_format.why,
            describe_writing(self.obstacle),
        )
        if (why := served.renderer.why_unusable) is not None:
            log.warning("chat requests will be refused: %s", why)
        return served

    def _try_tokenizer(self, tokenizer: bytes) -> None:
        """Raise ValueError if the tokenizer cannot be used. A tokenizer that `tidegate serve` tried
        before it started this process is not tried again."""
        trial, self._trial = self._trial, trial_process()
        if self._is_tried(tokenizer):
            trial.close()
        else:
            try_tokenizer(tokenizer, trial)

    def _is_tried(self, tokenizer: bytes) -> bool:
        """Return whether `tidegate serve` has tried this tokenizer."""
        return hashlib.sha256(tokenizer).hexdigest() == self.config.tried_tokenizer

    def new_group(
        self,
        prompt_requests: Sequence[PromptRequest],
        timeline: Timeline,
        **options: Unpack[GenerateOptions],
    ) -> ChoiceGroup:
        """Return a new group of choices. Nothing is sent to the engine before `ChoiceGroup.open`.
        The caller must pass the group to `forget` after its end."""
        group = ChoiceGroup(
            self.engine,
            prompt_requests,
            timeline=timeline,
            on_free=self.metrics.free_s.observe,
            **options,
        )
        self._groups.add(group)
        return group

    def raise_cached_refusal(self, context: RequestContext) -> None:
        """Raise the engine's last refusal of the caller's account, if it is still valid.

        Call this before rendering the prompt, to save that work for a refused request. A client
        that resumes a stream is not refused.
        """
        if context.headers.get(LAST_EVENT_HEADER, ""):
            return
        account = context.caller.account
        refusal = self._refusal_cache.get(account, time.monotonic())
        if refusal is not None:
            self.engine.connections[0].client.count_cached_refusal()
            raise refusal

    def cache_refusal(self, account: Account | None, refusal: ServingError) -> None:
        """Store a refusal for `raise_cached_refusal`, if there is only one engine. If there are
        several, each has its own queue, so the next one may accept the request."""
        if len(self.engine.connections) == 1:
            self._refusal_cache.add(account, refusal, time.monotonic())

    def id_bounds(self, num_prompts: int = 1) -> JsonBounds:
        """Return the limits on the JSON of a body that contains `num_prompts` prompts as token
        ids."""
        limits = self.engine.limits
        return JsonBounds.with_ids(num_prompts * (limits.max_len if limits else MAX_TOKEN_IDS))

    def forget(self, group: ChoiceGroup) -> None:
        """Remove a group that has ended, so that a shutdown does not abort it again."""
        self._groups.discard(group)
