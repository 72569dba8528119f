"""The state that all routes share: the hosts of the models, metrics, keys and readiness.

`app.create_app` creates one `Service` per process and passes it to every view. The routes share no
other state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import gevent
from gevent import get_hub

from gateway.auth.keys import KeyWatch
from gateway.context import RequestContext
from gateway.engine.base import EngineClient, NullEngineClient
from gateway.engine.client import ZmqEngineClient
from gateway.engine.control import SupervisorLink
from gateway.engine.model_loads import ModelLoads
from gateway.fleet.disaggregated import DisaggregatedClient
from gateway.fleet.engine_fleet import FleetOptions
from gateway.fleet.engine_list import EngineList
from gateway.fleet.replicas import ReplicatedClient
from gateway.formats.model_format import WrongOption
from gateway.gateway_start import READY, GatewayStart
from gateway.generation.run import JobRunner
from gateway.generation.time_limits import TimeLimits, TimeoutFields
from gateway.http.body import BodyReader
from gateway.http.body_memory import BodyMemory
from gateway.http.client_socket import NOT_GUNICORN, describe_writing
from gateway.http.connections import ClientConnections
from gateway.http.json_size import MAX_TOKEN_IDS, JsonBounds
from gateway.images.fetch import UrlFetcher
from gateway.images.reader import ImageReader
from gateway.model_host import ModelHost
from gateway.model_use import ModelUse
from gateway.observe.metrics import Metrics, ModelEngines
from gateway.observe.tracing import tracing_to
from gateway.observe.watch import WatchPoller
from gateway.sandbox.clients import TemplateProcesses
from gateway.served_model import Ability, check_ability
from gateway.store.batch_database import BatchDatabase
from gateway.store.database import Interrupt
from gateway.store.runs import DAY_S, Persistence
from gateway.store.sqlite_file import Store, write_obstacle
from gateway.thread_pool import result_of
from protocol.config.base import NO_PATH
from protocol.config.gateway import GatewayConfig, ModelConfig
from protocol.process.exit_codes import ExitCode
from protocol.wire.cluster_key import read_cluster_key
from protocol.wire.errors import (
    Draining,
    EngineLost,
    EngineNotReady,
    InvalidRequest,
    ServingError,
    UnknownModel,
)
from protocol.wire.sockets import checked_engine_address

log = logging.getLogger(__name__)

WATCH_S = 0.1
"""Interval of the checks in `Service._keep_watch`."""
KEYS_POLL_S = 1.0
"""Interval at which the file of API keys is checked for changes."""


T = TypeVar("T")


def offload(work: Callable[[], T]) -> T:
    """Run `work` in gevent's thread pool and return its result. Other greenlets run meanwhile."""
    return result_of(get_hub().threadpool, work)


def _engine_client(config: GatewayConfig, model: ModelConfig, metrics: Metrics) -> EngineClient:
    """Return the client for the engines of a model. Raises ValueError if an option is invalid."""
    if model.card:
        return NullEngineClient(model.card)
    key = read_cluster_key(config.cluster_key)
    client = partial(ZmqEngineClient, key=key, on_wire_error=metrics.wire_errors.inc)
    if not (model.decode or model.engines or model.engines_file):
        return client(model.engine or checked_engine_address(config.port))
    options = FleetOptions(
        failover_s=config.failover_s,
        on_routed=lambda reason: metrics.routed.labels(reason).inc(),
        on_moved=lambda cause: metrics.moved.labels(cause).inc(),
    )
    if not model.decode:
        return ReplicatedClient(EngineList(model.engines, model.engines_file, key), client, options)
    return DisaggregatedClient(
        EngineList(model.prefill, key=key),
        EngineList(model.decode, key=key),
        client,
        options,
        min_tokens=config.split_min_tokens,
        recomputes=config.kv_on_failure == "recompute",
        on_handover=metrics.handovers.inc,
        on_fallback=lambda cause: metrics.fallbacks.labels(cause).inc(),
    )


def open_file_store(config: GatewayConfig) -> Store[BatchDatabase] | None:
    """Return the store of files and batches, which opens its file on first use; None if the
    operator turned it off."""
    if config.file_store in ("", NO_PATH):
        return None
    return Store(
        partial(
            BatchDatabase,
            config.file_store,
            max_bytes=config.file_store_mib << 20,
            max_age_s=config.file_days * DAY_S,
        ),
        config.file_store,
        option="--file-store",
    )


class BackgroundWork(Protocol):
    """Work of this process that no connection waits for."""

    def start(self) -> None: ...
    def wake(self) -> None:
        """Look for new work now."""

    def close(self) -> None: ...


class Service:
    """The state that all routes of one process share.

    interrupt  maps each kind of detached run to the function that writes the run's end if the
               process that generated the run has died

    The constructor raises ValueError if an option of `config` is invalid.
    """

    def __init__(self, config: GatewayConfig, interrupt: Mapping[str, Interrupt]) -> None:
        self.config = config
        self.templates = TemplateProcesses()
        self.images = ImageReader(
            UrlFetcher(config.image_urls),
            offload=offload,
            max_bytes=config.preprocessed_images_mib << 20,
        )
        self.bodies = BodyReader(config.max_body_mib << 20, BodyMemory(config.body_memory_bytes))
        self.keys = KeyWatch(config)
        self.metrics = Metrics(
            self._list_engines, [m.served_name[0] for m in config.models if config.has_several]
        )
        self.link = (
            SupervisorLink(config.control, ModelLoads(), self._on_loads_change)
            if config.control
            else None
        )
        #: The models in the order of the config; at least one.
        self.hosts = [self._new_host(model) for model in config.hosted]
        #: Hosts of models that clients have deleted, until their last request has ended.
        self._removed_hosts: list[ModelHost] = []
        #: Returns whether this process is shutting down. The server that runs it (gunicorn) sets
        #: this attribute and the next four.
        self.is_draining: Callable[[], bool] = lambda: False
        #: The place of this process among those that share its port.
        self.place = GatewayStart(1).take_place()
        #: Whether open answers end now, with an error, instead of continuing for `drain_s`.
        self.ends_at_once = False
        #: Called with a reason and an exit code if the first model cannot be served. The code None
        #: means gunicorn's own exit code.
        self.give_up: Callable[[str, ExitCode | None], None] = lambda why, code: None
        #: Why streams are not written directly to the clients' sockets; None if they are.
        self.obstacle: str | None = NOT_GUNICORN
        self.tracing = tracing_to(config.otlp_traces_endpoint)
        self.connections = ClientConnections()
        self.runner = JobRunner(
            config,
            open_answers=self.metrics.open_answers,
            on_free=self.metrics.free_s.observe,
            is_draining=lambda: self.is_draining(),
        )
        self.watch = WatchPoller(
            lambda: [(host.name, host.engine.connections) for host in self.hosts],
            lambda: self.is_draining(),
        )
        self.persistence = Persistence.from_config(config, interrupt)
        #: Files and batches; None if the operator turned storing them off.
        self.files = open_file_store(config)
        self.background: list[BackgroundWork] = []
        self.started_at = time.monotonic()
        self._watch: gevent.Greenlet[..., None] | None = None

    def _new_host(self, model: ModelConfig) -> ModelHost:
        return ModelHost(
            model,
            _engine_client(self.config, model, self.metrics),
            self.templates,
            self.images,
            link=self.link,
            end_of_service=self._draining,
            describe_writing=lambda: describe_writing(self.obstacle),
            on_unservable=self._on_unservable,
        )

    def start(self) -> None:
        """Start the sandbox processes, the hosts, and the greenlet that checks their states. Call
        this after the fork. Later calls have no effect."""
        if self._watch is None:
            self._warn_of_stores()
            self.templates.start()
            for host in self.hosts:
                host.start()
            if self.link is not None:
                self.link.start()
            for work in self.background:
                work.start()
            self._watch = gevent.spawn(self._keep_watch)
            for host in self.hosts:
                if host.config.load == "start":  # others are prepared while they load
                    gevent.spawn(host.prepare_expected)

    def _warn_of_stores(self) -> None:
        """Log one line if a store cannot be written, with its option, its file and the cause."""
        responses = self.persistence.store if self.persistence is not None else None
        problems = [
            f"{store.option} {store.path} ({why})"
            for store in (responses, self.files)
            if store is not None and (why := write_obstacle(store.path))
        ]
        if problems:
            log.warning("cannot write %s; requests that need it get 503", " and ".join(problems))

    def close(self) -> None:
        """Wait until detached generations have ended, then close everything. Outside a drain,
        detached generations are ended at once.

        The server calls this after all its connections have ended.
        """
        for work in self.background:
            work.close()
        if self.persistence is not None:
            while self.persistence.is_busy and self._watch is not None:
                if not self.is_draining():
                    self.runner.end_all(self._shutdown_error)
                gevent.sleep(WATCH_S)
        if self._watch is not None:
            self._watch.kill()
        self.watch.close()
        if self.persistence is not None:
            self.persistence.close()
        if self.files is not None:
            self.files.close()
        if self.link is not None:
            self.link.close()
        for host in [*self.hosts, *self._removed_hosts]:
            host.close()
        self.templates.close()
        self.images.close()
        if self.tracing is not None:
            self.tracing.close()

    def _keep_watch(self) -> None:
        """Prepare a new model before the first request, reload keys, and end a drain in time. This
        runs in a greenlet of its own."""
        draining_since: float | None = None
        polled_at = time.monotonic()
        while True:
            gevent.sleep(WATCH_S)
            for host in self.hosts:
                host.poll()
            if self.trouble() is None:
                self.place.set_state(READY)
            if time.monotonic() - polled_at >= KEYS_POLL_S:
                polled_at = time.monotonic()
                self.keys.poll()
            if not self.is_draining():
                continue
            draining_since = draining_since or time.monotonic()
            self.connections.close_idle()
            if self.ends_at_once or time.monotonic() - draining_since >= self.config.drain_s:
                self.runner.end_all(self._shutdown_error)

    def _shutdown_error(self, engine: EngineClient) -> ServingError:
        """Return the error that ends an open answer of `engine` when this process shuts down."""
        if not self.ends_at_once:
            return Draining("this server was shut down before the answer was complete")
        found = ((each, each.client.trouble()) for each in engine.connections)
        lost = [(each, trouble) for each, trouble in found if isinstance(trouble, EngineLost)]
        if not lost:
            return Draining("the server stops after a failure, before the answer was complete")
        # The engine that was silent first is the cause: the others were stopped because of it.
        connection, trouble = max(lost, key=lambda pair: pair[0].client.silence_s or 0.0)
        which = f"{connection.role} engine" if connection.role else "engine"
        return EngineLost(f"the server stops: the {which} was lost: {trouble.message}")

    # ---- models

    @property
    def names(self) -> list[str]:
        """The names of all models, as far as they are known."""
        return [name for host in self.hosts for name in host.names]

    def host(self, name: str | None) -> ModelHost:
        """Return the host of the model `name`; with None, that of the only model.

        Raises UnknownModel if no model has this name. Raises InvalidRequest if `name` is None and
        there are several models. The name of the only model may be unknown until it is ready, so
        `use` checks it.
        """
        if len(self.hosts) == 1 and (name is None or not self.config.manage_models):
            return self.hosts[0]
        if name is None:
            raise InvalidRequest.at(
                "model", f"required, as this server has several models: {', '.join(self.names)}"
            )
        for host in self.hosts:
            if name in host.names:
                return host
        model = name.rpartition(":")[0]
        for host in self.hosts:
            if model in host.names or host.adapter_of(name) is not None:
                return host
        self.check_models_known()
        raise self.unknown_model(name)

    def check_models_known(self) -> None:
        """Raise EngineNotReady if clients manage the models, and this process has not received them
        yet. A process that has replaced another one starts with the models of the command line."""
        link = self.link
        if link is not None and self.config.manage_models and link.loads.hosted is None:
            raise EngineNotReady("the supervisor has not reported the models yet", retry_after_s=1)

    def use(
        self,
        context: RequestContext,
        name: str | None,
        body: TimeoutFields | None = None,
        *,
        ability: Ability = "generate",
    ) -> ModelUse:
        """Return the use of the model `name` by a request. If the model is not loaded, have it
        loaded and wait.

        name     the request's `model`; None: the only model
        body     the request's body, if the engine is to compute it; it may set time limits.
                 Otherwise the operator's limits apply
        ability  what a request with a body needs of the model

        Raises the errors of `host`, of `ModelHost.use` and of `check_ability`. With a body, raises
        the engine's last refusal of the caller, if it is still valid.
        """
        if (draining := self._draining()) is not None:
            raise draining
        host = self.host(name)
        use = host.use(context, TimeLimits.from_request(body, self.config))
        if name is not None and name not in host.names:
            if (adapter := host.adapter_of(name)) is None:
                raise self.unknown_model(name)
            if body is not None and ability != "generate":
                raise InvalidRequest.at("model", f"{name!r} is an adapter, which has no embeddings")
            use = replace(use, adapter=adapter)
        if body is not None:
            check_ability(use.model.card, ability, name or use.model.names[0])
            host.raise_cached_refusal(context)
        return use

    def unknown_model(self, name: str) -> UnknownModel:
        """Return the error of a request for a model, or an adapter, that does not exist."""
        adapters = (info.name for host in self.hosts for info in host.adapters)
        known = ", ".join([*self.names, *adapters])
        return UnknownModel(
            f"the model {name!r} does not exist; this server serves {known}",
            param="model",
        )

    def trouble(self) -> ServingError | None:
        """Return why this server is not ready; None if it is ready. The result is the first error
        of a model that should be loaded, or whose state is not known yet."""
        troubles = (host.trouble() for host in self.hosts if host.is_awaited)
        return self._draining() or next((each for each in troubles if each is not None), None)

    @property
    def ready_hosts(self) -> list[ModelHost]:
        """The hosts of the models whose engines accept requests; none if the process shuts down."""
        return [] if self.is_draining() else [h for h in self.hosts if h.trouble() is None]

    def _list_engines(self) -> list[ModelEngines]:
        several = self.config.has_several
        return [
            ModelEngines(host.name if several or host.has_served else "", host.engine.connections)
            for host in self.hosts
        ]

    def _on_loads_change(self) -> None:
        for host in [*self.hosts, *self._removed_hosts]:
            host.on_loads_change()
        assert self.link is not None
        if self.link.loads.hosted is not None:
            self._update_hosts(self.link.loads, self.link.loads.hosted)

    def _update_hosts(self, loads: ModelLoads, hosted: Sequence[ModelConfig]) -> None:
        """Serve the models `hosted`. A model that was deleted keeps its host until the supervisor
        has unloaded it."""
        before = {(host.key, host.config.engine): host for host in self.hosts}
        hosts = []
        for config in hosted:
            host = before.pop((config.supervised_name, config.engine), None)
            if host is None:
                host = self._new_host(config)
                host.start()
            host.rename(config.served_name)
            hosts.append(host)
        self.hosts = hosts
        for host in before.values():
            host.remove()
            self._removed_hosts.append(host)
        current = {host.key for host in hosts}
        for host in [*self._removed_hosts]:
            if host.key in current or not loads.has(host.key):
                self._removed_hosts.remove(host)
                gevent.spawn(host.close)
                if host.key not in current:
                    loads.remove(host.key)

    def _draining(self) -> ServingError | None:
        """Return the error of new requests if this process is shutting down; otherwise None."""
        if not self.is_draining():
            return None
        return Draining("this server is shutting down", retry_after_s=1)

    def _on_unservable(self, error: ValueError) -> None:
        """End the process if its only model cannot be served. With several models, the others
        continue."""
        if self.config.has_several:
            return
        code = None if isinstance(error, WrongOption) else ExitCode.BAD_MODEL
        self.give_up(str(error), code)

    def id_bounds(self, num_prompts: int = 1) -> JsonBounds:
        """Return the limits on the JSON of a body that contains `num_prompts` prompts as token
        ids. The body is not read yet, so those of the longest model apply."""
        limits = [host.engine.limits for host in self.hosts]
        longest = max(each.max_len if each else MAX_TOKEN_IDS for each in limits)
        return JsonBounds.with_ids(num_prompts * longest)
