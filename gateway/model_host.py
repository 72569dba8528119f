"""One model of this server: its engine client, its state, and the requests that wait for it.

The service has a `ModelHost` for each model. A request looks its host up once, by name, and keeps
the result as a `ModelUse` until its end. If the model is not loaded, the request waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import gevent
import msgspec
from gevent.event import Event

from gateway.context import RequestContext
from gateway.engine.base import EngineClient
from gateway.engine.control import SupervisorLink
from gateway.formats.model_format import ModelOutputFormat
from gateway.generation.group import ClientGone
from gateway.generation.time_limits import TimeLimits
from gateway.http.client_socket import HangUp
from gateway.http.sse import LAST_EVENT_HEADER
from gateway.images.reader import ImageReader
from gateway.model_preparation import ModelPreparation
from gateway.model_use import ModelUse, adapter_named
from gateway.sandbox.clients import TemplateProcesses
from gateway.served_model import ServedModel
from protocol.config.gateway import ModelConfig
from protocol.engine.adapters import AdapterInfo
from protocol.engine.messages import Limits
from protocol.engine.model_card import ModelCard, SamplingDefaults, read_card
from protocol.tools.control import LoadState
from protocol.wire.errors import EngineNotReady, InvalidRequest, ServingError, UnknownModel

log = logging.getLogger(__name__)

SLEEP_POLL_S = 0.05
"""Interval at which `ModelHost.sleep` checks whether the model is unloaded."""


class ModelHost:
    """One model that this process serves.

    engine            the client for the model's engines; the host starts and closes it
    link              the connection to the supervisor, which loads and unloads the model; None:
                      its engines run all the time
    end_of_service    returns the error of all new requests if this process shuts down, or None
    describe_writing  returns in words how this process writes streams, for the log
    on_unservable     called if the first model that the engine reports cannot be served

    The constructor raises ValueError if an option of `config` is invalid.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine: EngineClient,
        templates: TemplateProcesses,
        images: ImageReader | None = None,
        *,
        link: SupervisorLink | None = None,
        end_of_service: Callable[[], ServingError | None],
        describe_writing: Callable[[], str],
        on_unservable: Callable[[ValueError], None],
    ) -> None:
        self.config = config
        self._preparation = ModelPreparation(
            config,
            templates,
            images,
            describe_writing=describe_writing,
            on_unservable=on_unservable,
        )
        self.engine = engine
        self._link = link
        self._key = config.supervised_name  # the model's name in the supervisor
        if link is not None:
            link.loads.add(self._key, is_unloaded=config.load == "first-use")
        self._end_of_service = end_of_service
        self._created_at = int(time.time())
        #: Set when something has changed for requests that wait. Then it is replaced by a new one.
        self._changed = Event()
        self._num_waiting = 0
        #: `ModelLoads.num_exits`, as far as the engine client was called.
        self._num_exits = link.loads.num_exits(self._key) if link is not None else 0
        #: Whether a client has deleted the model, so that only open requests use it.
        self.is_removed = False

    def start(self) -> None:
        """Start the trial of the tokenizer, if one is needed, and the engine client. Call this
        after the fork."""
        self._preparation.start()
        self.engine.start()

    def close(self) -> None:
        self.engine.close()
        self._preparation.close()

    @property
    def key(self) -> str:
        """The name of the model in the supervisor, which does not change."""
        return self._key

    def rename(self, names: Sequence[str]) -> None:
        """Serve the model under other names from now on."""
        if list(names) != self.config.served_name:
            self.config = msgspec.structs.replace(
                self.config, served_name=list(names), key=self._key
            )
            self._preparation.rename(self.config)

    def remove(self) -> None:
        """End the waits for the model, because a client has deleted it. Open requests continue."""
        self.is_removed = True
        self.on_change()

    # ---- the model

    @property
    def name(self) -> str:
        """The main name of the model: its first served name, or else the name in the model card; ""
        while that is unknown."""
        if self.config.served_name:
            return self.config.served_name[0]
        served = self._preparation.served
        return served.names[0] if served is not None else ""

    @property
    def names(self) -> Sequence[str]:
        """All names of the model, the main one first; empty while they are unknown."""
        served = self._preparation.served
        return self.config.served_name or (served.names if served else ())

    @property
    def adapters(self) -> Sequence[AdapterInfo]:
        """The LoRA adapters of the model that requests can use now."""
        return self.engine.adapters

    def adapter_of(self, name: str) -> AdapterInfo | None:
        """Return the adapter that a request's `model` names, by its own name or as MODEL:ADAPTER;
        None if there is none."""
        model, colon, adapter = name.rpartition(":")
        if colon and model not in self.names:
            return None
        return adapter_named(adapter, self.adapters)

    @property
    def has_served(self) -> bool:
        """Whether the model has become available since the start."""
        return self._preparation.served is not None

    @property
    def served(self) -> ServedModel | None:
        """The model that was prepared last, whether its engine still runs or not."""
        return self._preparation.served

    @property
    def is_unloaded(self) -> bool:
        """Whether the model's engines do not run, or will be stopped."""
        return self._unloaded_state() is not None

    def facts(self) -> ListedModel | None:
        """Return the facts about the model for a list of models. Before its engine has reported it,
        they come from the card of the expected model; without one the result is None."""
        served, fills, limits, refusal = self.served, None, None, None
        if served is not None:
            card, max_len, created_at = served.card, served.limits.max_len, served.created_at
            defaults, output_format = served.defaults, served.output_format
            fills, limits = served.infill is not None, served.limits
            refusal = served.renderer.image_refusal
        elif self._expected is not None:
            card, max_len, created_at = *self._expected, self._created_at
            defaults, output_format = self._preparation.options.defaults_of(card), None
        else:
            return None
        return ListedModel(
            self.names or [card.name],
            card,
            self.state,
            created_at,
            max_len,
            limits,
            defaults.for_request(),
            output_format,
            fills,
            refusal,
        )

    def adapter_facts(self, model: ListedModel) -> dict[str, ListedModel]:
        """Return the facts about the model's adapters, by their names, for a list of models.
        `model` has the facts about the model itself."""
        return {
            info.name: replace(model, names=[info.name], path=info.path, parent=model.names[0])
            for info in self.adapters
        }

    @cached_property
    def _expected(self) -> tuple[ModelCard, int] | None:
        """The card of the expected model, and the length of its longest request; None if it is not
        known."""
        if not self.config.expected_card:
            return None
        file = read_card(self.config.expected_card)
        return file.card, file.max_len

    @property
    def is_wanted(self) -> bool:
        """Whether the model should be loaded now, so that the server is not ready without it: it is
        loaded at the start, and nothing has unloaded it."""
        return self.config.load == "start" and self._unloaded_state() is None

    @property
    def is_awaited(self) -> bool:
        """Whether the server is not ready without this model: it is wanted, or may be, because the
        supervisor has not reported its state yet."""
        return self.is_wanted or not self._is_reported

    @property
    def state(self) -> str:
        """The state for operators: "ready" if requests are served now. Otherwise a `LoadState` of
        `protocol.tools.control`."""
        if self.trouble() is None:
            return "ready"
        if (state := self._unloaded_state()) is not None:
            return state
        if self._is_unservable:
            return "failed"
        last = self._link.loads.state(self._key) if self._link is not None else None
        return "failed" if last is not None and last.state == "failed" else "loading"

    def trouble(self) -> ServingError | None:
        """Return the error that every request for this model would get now if it did not wait, or
        None if requests can be served. If the engine has reported a new model, prepare it first."""
        trouble = self._unloaded_error() or self.engine.trouble()
        if trouble is not None:
            why = f"the engine is not ready: {trouble.message}"
            return type(trouble)(why, retry_after_s=trouble.retry_after_s or 1)
        try:
            self._current_model()
        except ValueError:
            return EngineNotReady("the engine's model cannot be served by this gateway")
        return None

    def _unloaded_state(self) -> LoadState | None:
        """Return the model's state if its engines are stopped or will be; otherwise None."""
        return self._link.loads.unloaded_state(self._key) if self._link is not None else None

    @property
    def _is_reported(self) -> bool:
        """Whether the state of the model is known, or there is no supervisor that reports it."""
        return self._link is None or self._link.loads.state(self._key) is not None

    def _unloaded_error(self) -> ServingError | None:
        """Return why no request may be given to the engines, whatever their own state is."""
        if not self._is_reported:
            return EngineNotReady("the supervisor has not reported the state of the model yet")
        if (state := self._unloaded_state()) is not None:
            return EngineNotReady(f"the model is {state}")
        return None

    # ---- uses

    def use(self, context: RequestContext, limits: TimeLimits) -> ModelUse:
        """Return the use of the model by a request. It lasts until the context is closed, and until
        then the supervisor does not unload the model.

        If the model is not loaded, have it loaded, and wait. Raises the error that every request
        would get if the model is not one that requests wait for. Raises EngineNotReady if it cannot
        be loaded or takes too long, QueueTimeout, TimedOut, Draining or ClientGone.
        """
        context.model = self.name
        waited_s = 0.0
        if (trouble := self._refusal()) is not None:
            started_at = time.monotonic()
            self._await_model(trouble, limits, context.environ)
            waited_s = time.monotonic() - started_at
        # Nothing may switch greenlets between the check of the state and this.
        if self._link is not None:
            loads = self._link.loads
            loads.open(self._key)
            context.call_on_close(lambda record: loads.close(self._key))
        model = self._current_model()
        context.model = model.names[0]
        return ModelUse(self.engine, model, waited_s)

    def poll(self) -> None:
        """Prepare a new model before the first request, and wake up the requests that wait if they
        may continue. Call this several times a second."""
        refusal = self._refusal()
        if refusal is None or self._end_of_service() is not None:
            self.on_change()

    def on_loads_change(self) -> None:
        """Handle new states of the supervisor's models. Nothing may switch greenlets between their
        arrival and this.

        If all engines of the model have exited, end the sessions with them. The client may notice
        their exit later than the supervisor. Until then it would send requests to them as soon as
        the model is ready again.
        """
        if self._link is not None:
            num_exits = self._link.loads.num_exits(self._key)
            if num_exits != self._num_exits:
                self._num_exits = num_exits
                self.engine.on_exited()
        self.on_change()

    def on_change(self) -> None:
        """Have the requests that wait check the state again."""
        if self._num_waiting:
            changed, self._changed = self._changed, Event()
            changed.set()

    def _await_model(
        self, trouble: ServingError, limits: TimeLimits, environ: Mapping[str, Any]
    ) -> None:
        """Return as soon as the model is available. `trouble` is why it is not."""
        link = self._link
        if (
            link is None
            or self.is_removed
            or not link.loads.keeps_requests(self._key)
            or self._is_unservable
        ):
            raise trouble
        log.info("a request waits until %s is loaded", self.name)
        until, too_late = limits.load_deadline(self.name, time.monotonic())
        refusals = link.loads.num_refusals(self._key)
        is_gone = Event()

        def on_hang_up() -> None:
            is_gone.set()
            self.on_change()

        if not self._num_waiting:
            gevent.spawn(self.prepare_expected)  # while the engine loads
        hang_up = HangUp(environ, on_hang_up)
        self._num_waiting += 1
        link.loads.keep(self._key)
        try:
            while (problem := self._refusal()) is not None:
                if is_gone.is_set():
                    raise ClientGone
                if self.is_removed:
                    raise self._removed_error()
                if self._end_of_service() is not None or self._is_unservable:
                    raise problem
                if link.loads.num_refusals(self._key) != refusals:
                    raise link.loads.refusal(self._key)
                changed = self._changed
                link.request_load(self._key)
                if not changed.wait(max(0.0, until - time.monotonic())):
                    raise too_late
        finally:
            self._num_waiting -= 1
            link.loads.release(self._key)
            hang_up.close()

    def _removed_error(self) -> ServingError:
        return UnknownModel(f"the model {self.name} was deleted", param="model")

    def _refusal(self) -> ServingError | None:
        """Return why no request may be given to the model's engines now, or None."""
        if self.is_removed:
            return self._removed_error()
        refusal = self._end_of_service() or self.trouble()
        if refusal is None and self._link is not None and not self._link.loads.accepts(self._key):
            return EngineNotReady("the model is loading", retry_after_s=1)
        return refusal

    @property
    def _is_unservable(self) -> bool:
        """Whether the engine's current model cannot be served by this process."""
        return self._preparation.has_failed(self.engine.model)

    def sleep(self) -> None:
        """Have the supervisor unload the model, and wait until that is done. Raises EngineNotReady
        if it refuses, or if requests have the model loaded again meanwhile. Raises InvalidRequest
        if this server cannot unload its model."""
        if self._link is None:
            raise InvalidRequest(
                "model: this server keeps its only model loaded; start it with --load, "
                "--idle-unload-s or --models FILE to unload it",
                param="model",
            )
        loads, version = self._link.loads, self._link.stop_model(self._key)
        while loads.version < version or loads.unloaded_state(self._key) == "stopping":
            gevent.sleep(SLEEP_POLL_S)
        if not self.is_unloaded:
            raise EngineNotReady(f"the model {self.name} is {self.state} again", retry_after_s=1)

    # ---- the prepared model

    def prepare_expected(self) -> None:
        """Prepare the text side of the model that the engine is loading, if it is known. If that
        fails, the model is prepared when the engine reports it, and the error is reported then."""
        self._preparation.prepare_expected()

    def _current_model(self) -> ServedModel:
        """Return the served model, prepared from the engine's last Welcome message.

        A new Welcome may have another model, because the engine may have restarted with one. Raises
        ValueError if the model cannot be served.
        """
        card, limits = self.engine.model, self.engine.limits
        assert card is not None
        assert limits is not None
        return self._preparation.served_model(card, limits)

    # ---- refusals that still hold

    def raise_cached_refusal(self, context: RequestContext) -> None:
        """Raise the engine's last refusal of the caller's account, if it is still valid.

        This is called before the prompt is rendered, to save that work for a refused request. A
        client that resumes a stream is not refused.
        """
        if context.headers.get(LAST_EVENT_HEADER, ""):
            return
        account = context.caller.account
        if (refusal := self.engine.cached_refusal(account)) is not None:
            raise refusal


@dataclass(frozen=True, slots=True)
class ListedModel:
    """The facts about a model, loaded or not, that lists of models contain."""

    names: Sequence[str]
    #: The model's card. If the model has not been loaded yet, it has no facts about weights.
    card: ModelCard
    #: `ModelHost.state`.
    state: str
    #: When this process started to serve the model, in seconds since 1970.
    created_at: int
    #: Most tokens of a prompt and its answer together.
    max_len: int
    #: The limits of its engines; None if they are not known yet.
    limits: Limits | None
    defaults: SamplingDefaults
    #: How answers are parsed; None if the model has not been prepared yet.
    output_format: ModelOutputFormat | None
    #: Whether the model can fill in the middle; None if it has not been prepared yet.
    fills_in_middle: bool | None
    #: Why images are refused; "": the model reads them; None if it has not been prepared yet.
    image_refusal: str | None
    #: The main name of the model that a LoRA adapter changes; "": this is no adapter.
    parent: str = ""
    #: Path of an adapter; "": this is no adapter.
    path: str = ""

    @property
    def max_slots(self) -> int:
        """Number of requests that an engine computes at the same time; 0: it is not known yet."""
        return 0 if self.limits is None else self.limits.max_slots

    @property
    def root(self) -> str:
        """The model's own name, or the path of an adapter as the operator gave it."""
        return self.path or self.card.name
