"""Several equal engines that are used as one: their open requests, and the moves between them.

The engines are the replicas of a model (`replicas.py`), or those with one role in a split server
(`disaggregated.py`). Callers see one engine. This module sends each prompt to a replica
(`replica_selector.py`) and moves requests away from replicas that refuse them or are lost; the
states of a request are in `failover.py`. The rules:

- all choices of a prompt are sent to one replica, which computes the prompt once;
- a replica that is not ready, or drains, gets no new requests; those that it has go on;
- a request that a replica refuses for a cause of its own, such as a full queue, is tried on the
  others; if all refuse, the client gets the refusal with the shortest wait;
- if a replica is lost, its requests continue on other replicas from the tokens so far. The seed is
  drawn here, and seed and position fix each draw, so replicas with the same model and numerics
  continue with the same tokens;
- if no replica is ready, these requests wait for one, for up to `failover_s`;
- each replica enforces its part of an account's limits, so that the total is the limit.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, Unpack

from gevent import get_hub
from msgspec.structs import replace

from gateway.engine.base import Report, RoutedOptions, Subscriber, remaining_s
from gateway.fleet.failover import (
    FailoverAction,
    FailoverEvent,
    FailoverState,
    usage_after_moves,
)
from gateway.fleet.fleet_state import FleetState
from gateway.fleet.replica_selector import ReplicaSelector, cache_space
from gateway.fleet.replica_set import ConnectedReplica, ReplicaSet
from gateway.fleet.replicated_request import BUSY_CODES, ReplicatedRequest, shorter_wait
from gateway.fleet.routing import Reason
from protocol.engine.messages import Aborted, Accepted, Output, Refused
from protocol.engine.sampling import SamplingParams
from protocol.engine.timeline import AbortReason
from protocol.wire.arrays import Int32
from protocol.wire.errors import (
    EngineError,
    EngineLost,
    EngineNotReady,
    ServingError,
    StaleAdapter,
    error_from,
)

TICK_S = 0.1
"""Interval at which stranded requests are tried again."""
POLL_S = 1.0
"""Interval at which the list of engines is read."""
MAX_LOSSES = 3
"""A request that loses this many replicas is ended, because it may itself be what ends them."""


Routed = TypeVar("Routed", bound=ReplicatedRequest)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How long requests wait for an engine, and what is called for the metrics."""

    #: How long a request whose engine was lost may wait for another one; 0: it does not wait.
    failover_s: float
    #: Called with the reason for the choice of the engine that computes a prompt.
    on_routed: Callable[[Reason], None]
    #: Called for each request that is moved: with "refused", "lost" (before its first token) or
    #: "continued".
    on_moved: Callable[[str], None]


class EngineFleet(FleetState, Generic[Routed]):
    """Sends each request to one of several equal engines, and moves it if that engine is lost.

    replicas      the engines
    request_type  the class of the open requests
    """

    def __init__(
        self, replicas: ReplicaSet, request_type: type[Routed], options: FleetOptions
    ) -> None:
        super().__init__(replicas)
        self._request_type = request_type
        self._failover_s, self._on_moved = options.failover_s, options.on_moved
        self._selector = ReplicaSelector(self._replicas, options.on_routed)
        self._requests: dict[int, Routed] = {}  # the open ones
        self._last_number = 0
        self._polled_at = float("-inf")
        self._clock: Any = None

    # ---- lifecycle

    def start(self) -> None:
        if self._clock is None:
            self._replicas.start()
            self._clock = get_hub().loop.timer(TICK_S, repeat=TICK_S)
            self._clock.start(self._tick)

    def close(self) -> None:
        if self._clock is not None:
            self._clock.stop()
            self._clock.close()
            self._clock = None
        for number in list(self._requests):
            self.abort(number, "client_lost")
        self._replicas.close()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._polled_at >= POLL_S:
            self._polled_at = now
            self._replicas.update_list({request.replica for request in self._requests.values()})
        self._replicas.refresh()
        for request in list(self._requests.values()):
            if request.failover.state is not FailoverState.STRANDED:
                continue
            if now - request.stranded_at > self._failover_s:
                self._end_stranded(request)
            elif self._replicas.router.usable:
                request.tried.clear()
                self._on_event(request, FailoverEvent.RETRY)

    # ---- requests

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        subscriber: Subscriber,
        **options: Unpack[RoutedOptions],
    ) -> int:
        """Send a request to a replica and return its number; see `RequestSender.generate`."""
        request = self._new_request(prompt, params, subscriber, options)
        self._open(request)
        return request.number

    def _new_request(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        subscriber: Subscriber,
        options: RoutedOptions,
    ) -> Routed:
        """Return a new request, which is sent by `_open`."""
        self.start()
        self._replicas.refresh()
        ids = prompt if isinstance(prompt, Int32) else Int32.of(prompt)
        if params.seed is None:  # an engine would draw one that no other engine knows
            params = replace(params, seed=secrets.randbits(63))
        self._pin_adapter(options)
        namespace, session = cache_space(options), options.pop("session", "")
        return self._request_type(
            number=self._new_number(),
            prompt=ids,
            params=params,
            subscriber=subscriber,
            options=options,
            hashes=self._selector.hashes(ids, namespace),
            session=f"{namespace}/{session}" if session else "",
            digest=self._replicas.digest,
        )

    def _new_number(self) -> int:
        """Return a number that no request of this client has had."""
        self._last_number += 1
        return self._last_number

    def _pin_adapter(self, options: RoutedOptions) -> None:
        """Set the digest of the adapter in `options`, so that another replica continues with the
        same one. If no replica has an adapter of this name, an engine refuses the request."""
        name = options.get("adapter", "")
        if name and not options.get("adapter_digest"):
            digests = (info.digest for info in self.adapters if info.name == name)
            options["adapter_digest"] = next(digests, "")

    def _open(self, request: Routed) -> None:
        """Send a new request to a replica. Raises a ServingError if none takes it."""
        if not self._place(request):
            raise self._unplaced_error(request)
        self._requests[request.number] = request

    def _unplaced_error(self, request: Routed) -> ServingError:
        """Return the error of a new request that was sent to no replica."""
        if isinstance(request.refusal, Refused):
            return error_from(request.refusal.error)
        if self._selector.lacks_adapter(request):
            name = request.options["adapter"]
            return StaleAdapter(
                f"no replica has this version of the adapter {name!r:.200} now: try again",
                retry_after_s=1,
            )
        held = self._replicas.shortest_refusal(request.options.get("account"))
        return held or self.trouble() or EngineNotReady("no engine is ready", retry_after_s=1)

    def abort(
        self,
        request: int,
        reason: AbortReason,
        *,
        on_freed: Callable[[], None] | None = None,
    ) -> None:
        found = self._requests.get(request)
        if found is not None:
            found.abort_reason, found.on_freed = reason, on_freed
            self._on_abort(found)

    def _on_abort(self, request: Routed) -> None:
        request.on_answered(is_accepted=False)
        self._on_event(request, FailoverEvent.ABORT)

    def abort_by_label(self, labels: Sequence[str]) -> Aborted:
        """Abort requests by label; see `EngineClient.abort_by_label`. Requests of this process that
        are just being moved are aborted, too."""
        self.start()
        if (trouble := self.trouble()) is not None and not self._requests:
            raise trouble
        aborted: set[str] = set()
        named = [r for r in self._requests.values() if not r.labels.isdisjoint(labels)]
        for request in named:
            request.is_stopped = True
            if request.failover.state is FailoverState.STRANDED:
                self._stop(request)
        for replica in list(self._replicas):
            if replica.client.session.is_ready:
                with contextlib.suppress(EngineError):  # a lost engine has no open requests
                    aborted.update(replica.client.abort_by_label(labels).aborted)
        for request in named:
            if request.has_been_stopped:
                aborted |= request.labels
        return Aborted(
            request=0,
            aborted=[label for label in labels if label in aborted],
            unknown=[label for label in labels if label not in aborted],
        )

    # ---- sending a request to a replica

    def _place(self, request: Routed) -> bool:
        """Send the request to the best replica that was not tried. Return False if none takes it.

        This is also called in gevent's hub, so it does not block.
        """
        now = time.monotonic()
        while (decision := self._selector.select(request)) is not None:
            replica = self._replicas.get(decision.replica)
            options = self._options_for(request, replica, now)
            on_report = partial(self._on_report, request)
            try:
                request.inner = request.send(replica.client, on_report, options)
            except EngineError as error:
                request.tried.add(decision.replica)
                request.refusal = request.refusal or Refused(request=0, error=error.info())
                self._replicas.invalidate()
                self._replicas.refresh()
                continue
            request.replica = replica
            self._selector.on_sent(request, decision)
            return True
        return False

    def _options_for(self, request: Routed, replica: ConnectedReplica, now: float) -> RoutedOptions:
        """Return the options for this replica: with its part of the account's limits, the time that
        is left, and the answer so far if another replica had accepted the request."""
        options: RoutedOptions = {**request.options}
        account = options.get("account")
        if account is not None:
            options["account"] = self._replicas.part_of(account, replica)
        if request.num_losses or request.is_late:
            elapsed_s = now - request.arrived_at
            options["timeout_s"] = remaining_s(options.get("timeout_s", 0.0), elapsed_s)
            has_started = request.answer or request.is_prefilled
            queue_s = 0.0 if has_started else options.get("queue_timeout_s", 0.0)
            options["queue_timeout_s"] = remaining_s(queue_s, elapsed_s)
        if request.num_losses and request.failover.state is not FailoverState.SENT:
            options["answer"] = Int32.of(request.answer)
            if request.mirostat_mu is not None:
                options["mirostat_mu"] = request.mirostat_mu
        return options

    # ---- events

    def _on_report(self, request: Routed, report: Report) -> None:
        """Handle a report of the replica that has the request."""
        if type(report) is Output:
            if report.finish is None:
                self._on_tokens(request, report)
            elif report.error is not None and report.error.code == EngineLost.code:
                request.on_answered(is_accepted=False)
                self._on_loss(request, report)
            else:
                request.on_answered(is_accepted=True)
                self._on_event(request, FailoverEvent.FINISHED, self._merged(request, report))
        elif type(report) is Accepted:
            request.stranded_at = 0.0
            request.on_answered(is_accepted=True)
            self._on_event(request, FailoverEvent.ACCEPTED, report)
        elif type(report) is Refused:
            request.on_answered(is_accepted=False)
            self._on_refused(request, report)

    def _on_tokens(self, request: Routed, output: Output) -> None:
        if output.usage is not None:
            output = self._merged(request, output)
            request.first_usage = request.first_usage or output.usage
        request.answer += output.tokens
        request.mirostat_mu = output.mirostat_mu
        if request.failover.state is FailoverState.OPEN:  # the usual case, without the table
            request.subscriber(output)
        else:
            self._on_event(request, FailoverEvent.TOKENS, output)

    def _merged(self, request: Routed, output: Output) -> Output:
        """Return `output` with the usage of a request that was moved."""
        if output.usage is None or not request.num_losses:
            return output
        elapsed_s = time.monotonic() - request.sent_at
        return replace(
            output, usage=usage_after_moves(output.usage, request.first_usage, elapsed_s)
        )

    def _on_refused(self, request: Routed, refused: Refused) -> None:
        replica, is_accepted = request.replica, request.failover.state is FailoverState.MOVED
        assert replica is not None
        if request.options.get("is_first", True):
            account = request.options.get("account")
            replica.refusals.add(account, error_from(refused.error), time.monotonic())
        if refused.error.code not in BUSY_CODES:
            report: Report = refused
            if is_accepted:  # the client has an Accepted, so it gets an end instead
                report = Output(request=request.number, finish="error", error=refused.error)
            self._on_event(request, FailoverEvent.FINISHED, report)
            return
        if replica.number is not None:
            request.tried.add(replica.number)
        request.refusal = shorter_wait(request.refusal, refused)
        self._on_event(request, FailoverEvent.BUSY)

    def _on_loss(self, request: Routed, output: Output) -> None:
        """Move the request of a replica that was lost."""
        replica = request.replica
        request.num_losses += 1
        request.refusal = output
        if replica is not None and replica.number is not None:
            request.tried.add(replica.number)
        self._replicas.invalidate()
        self._replicas.refresh()
        if request.is_stopped:
            self._stop(request)
        elif request.num_losses + request.num_lost_before >= MAX_LOSSES:
            self._give_up(request, f"{MAX_LOSSES} engines were lost while they computed it")
        else:
            self._on_event(request, FailoverEvent.LOST)

    def _stop(self, request: Routed) -> None:
        """End a request that was aborted by label and that no replica has."""
        request.has_been_stopped = True
        end = Output(request=request.number, finish="abort")
        self._on_event(request, FailoverEvent.GIVEN_UP, end)

    def _end_stranded(self, request: Routed) -> None:
        self._give_up(request, f"no other engine was ready within {self._failover_s:g} s")

    def _give_up(self, request: Routed, why: str) -> None:
        end = Output(
            request=request.number,
            finish="error",
            error=EngineLost(f"the engine of this request was lost, and {why}").info(),
        )
        self._on_event(request, FailoverEvent.GIVEN_UP, end)

    def _on_event(
        self, request: Routed, event: FailoverEvent, report: Report | None = None
    ) -> None:
        """Change the request's state and perform the action that follows."""
        action = request.failover.on(event)
        if request.failover.state is FailoverState.ENDED:
            self._requests.pop(request.number, None)
        match action:
            case FailoverAction.EMIT:
                emitted = report or request.refusal
                assert emitted is not None
                request.subscriber(emitted)
            case FailoverAction.PLACE:
                self._move(request, event)
            case FailoverAction.ABORT if request.replica is not None:
                request.replica.client.abort(
                    request.inner, request.abort_reason, on_freed=request.on_freed
                )
            case FailoverAction.FREE if request.on_freed is not None:
                request.on_freed()

    def _move(self, request: Routed, event: FailoverEvent) -> None:
        """Send the request to another replica."""
        was_open = request.failover.state is FailoverState.MOVED
        if self._place(request):
            cause = "refused" if event is FailoverEvent.BUSY else "lost"
            self._on_moved("continued" if was_open and request.answer else cause)
        else:
            self._on_unplaced(request)

    def _on_unplaced(self, request: Routed) -> None:
        """Handle a request that a replica had, and that no other one takes now."""
        request.replica = None
        request.stranded_at = request.stranded_at or time.monotonic()
        self._on_event(request, FailoverEvent.UNPLACED)
        if request.failover.state is FailoverState.STRANDED and not self._failover_s:
            self._end_stranded(request)
