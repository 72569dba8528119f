"""The state that all routes share: the model host, metrics, keys and readiness.

`app.create_app` creates one `Service` per process and passes it to every view. The routes share no
other state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Unpack

import gevent
from gevent import get_hub

from gateway.auth.keys import KeyWatch
from gateway.engine.base import EngineClient, NullEngineClient, RoutedOptions
from gateway.engine.client import ZmqEngineClient
from gateway.engine.disaggregated import DisaggregatedClient
from gateway.engine.engine_list import EngineList
from gateway.engine.replicas import ReplicatedClient
from gateway.formats.model_format import WrongOption
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import PromptRequest
from gateway.generation.timeline import Timeline
from gateway.http.body import BodyReader
from gateway.http.client_socket import NOT_GUNICORN, IdleConnections, describe_writing
from gateway.http.json_size import MAX_TOKEN_IDS, JsonBounds
from gateway.model_host import ModelHost, ModelUse
from gateway.observe.metrics import Metrics
from gateway.observe.tracing import tracing_to
from gateway.sandbox.clients import TemplateProcesses
from gateway.store.database import Interrupt
from gateway.store.runs import Persistence
from gateway.threads import result_of
from protocol.cluster_key import read_cluster_key
from protocol.config.gateway import GatewayConfig
from protocol.errors import Draining, EngineLost, ServingError, UnknownModel
from protocol.exit_codes import ExitCode
from protocol.sockets import engine_address

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
    if config.engines or config.engines_file:
        return ReplicatedClient(
            EngineList(config.engines, config.engines_file, key),
            client,
            failover_s=config.failover_s,
            on_routed=lambda reason: metrics.routed.labels(reason).inc(),
            on_moved=lambda cause: metrics.moved.labels(cause).inc(),
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
        self.bodies = BodyReader(config.max_body_mib << 20)
        self.keys = KeyWatch(config)
        self.metrics = Metrics(lambda: self.host.engine.connections, lambda: self.host.name)
        self.host = ModelHost(
            config,
            _engine_client(config, self.metrics),
            self.templates,
            describe_writing=lambda: describe_writing(self.obstacle),
            on_unservable=self._on_unservable,
        )
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
        self.tracing = tracing_to(config.otlp_traces_endpoint, lambda: self.host.name)
        self.idle_connections = IdleConnections()
        self.persistence = Persistence.from_config(config, interrupt)
        self.started_at = time.monotonic()
        self._groups: set[ChoiceGroup] = set()
        self._watch: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        """Start the sandbox processes, the host, and the greenlet that checks the engine's state.
        Call this after the fork. Later calls have no effect."""
        if self._watch is None:
            self.templates.start()
            self.host.start()
            self._watch = gevent.spawn(self._keep_watch)
            gevent.spawn(self.host.prepare_expected)

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
        self.host.close()
        self.templates.close()
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
        for connection in self.host.engine.connections:
            if isinstance(trouble := connection.client.trouble(), EngineLost):
                which = f"{connection.role} engine" if connection.role else "engine"
                return EngineLost(f"the server stops: the {which} was lost: {trouble.message}")
        return Draining("the server stops after a failure, before the answer was complete")

    def use(self, name: str | None = None) -> ModelUse:
        """Return the use of the model that a request names. Raises EngineNotReady, EngineLost or
        Draining if nothing can be served now. Raises UnknownModel if `name` is not None and not one
        of the model's names."""
        if (draining := self._draining()) is not None:
            raise draining
        model = self.host.model()
        if name is not None and name not in model.names:
            raise UnknownModel(
                f"the model {name!r} does not exist; this server serves {', '.join(model.names)}",
                param="model",
            )
        return ModelUse(self.host, model)

    def trouble(self) -> ServingError | None:
        """Return the error that every request would get now, or None if requests can be served. If
        the engine has reported a new model, prepare it first."""
        return self._draining() or self.host.trouble()

    def _draining(self) -> ServingError | None:
        """Return the error of new requests if this process is shutting down; otherwise None."""
        if not self.is_draining():
            return None
        return Draining("this server is shutting down", retry_after_s=1)

    def _on_unservable(self, error: ValueError) -> None:
        """Give up, because the first model cannot be served."""
        code = None if isinstance(error, WrongOption) else ExitCode.BAD_MODEL
        self.give_up(str(error), code)

    def new_group(
        self,
        host: ModelHost,
        prompt_requests: Sequence[PromptRequest],
        timeline: Timeline,
        **options: Unpack[RoutedOptions],
    ) -> ChoiceGroup:
        """Return a new group of choices. Nothing is sent to the host's engine before
        `ChoiceGroup.open`. The caller must pass the group to `forget` after its end."""
        group = ChoiceGroup(
            host.engine,
            prompt_requests,
            timeline=timeline,
            on_free=self.metrics.free_s.observe,
            **options,
        )
        self._groups.add(group)
        return group

    def id_bounds(self, num_prompts: int = 1) -> JsonBounds:
        """Return the limits on the JSON of a body that contains `num_prompts` prompts as token
        ids."""
        limits = self.host.engine.limits
        return JsonBounds.with_ids(num_prompts * (limits.max_len if limits else MAX_TOKEN_IDS))

    def forget(self, group: ChoiceGroup) -> None:
        """Remove a group that has ended, so that a shutdown does not abort it again."""
        self._groups.discard(group)
