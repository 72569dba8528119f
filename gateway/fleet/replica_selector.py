"""Selects the replica for each request. All choices of one prompt go to the same replica."""

from __future__ import annotations

from collections.abc import Callable

from gateway.engine.base import RoutedOptions
from gateway.fleet.replica_set import ReplicaSet
from gateway.fleet.replicated_request import ReplicatedRequest
from gateway.fleet.routing import PrefixHash, Reason, RoutingDecision, prefix_hashes
from protocol.wire.arrays import Int32


class ReplicaSelector:
    """Selects replicas with the router of `replicas`.

    The choices of a prompt arrive one after the other. They are sent to the replica of the first
    one, which computes the prompt once. A request whose prompt was computed by a prefill engine
    goes to the least busy replica instead.

    on_routed   called with the reason for the selection of a replica that computes the prompt
    """

    def __init__(self, replicas: ReplicaSet, on_routed: Callable[[Reason], None]) -> None:
        self._replicas = replicas
        self._on_routed = on_routed
        #: The last prompt, its namespace and hashes, for its other choices.
        self._hashed: tuple[Int32, str, list[PrefixHash]] | None = None
        #: The last prompt that was sent, and where.
        self._last: tuple[Int32, RoutingDecision] | None = None

    def hashes(self, prompt: Int32, namespace: str) -> list[PrefixHash]:
        """Return the hashes of a new request's prompt in a namespace (`cache_space`)."""
        last = self._hashed
        if last is not None and last[0] is prompt and last[1] == namespace:
            return last[2]
        shown = self._replicas.shown
        limits = None if shown is None else shown.limits
        found = [] if limits is None else prefix_hashes(prompt, namespace, limits.block_tokens)
        self._hashed = prompt, namespace, found
        return found

    def select(self, request: ReplicatedRequest) -> RoutingDecision | None:
        """Return the best replica that was not tried, or None if there is none."""
        if request.num_losses:
            excluded = self._replicas.unfit_to_continue(request.digest)
        else:
            excluded = self._replicas.unfit(request.digest, request.options.get("account"))
        excluded |= request.tried | self._without_adapter(request)
        router = self._replicas.router
        if request.is_prefilled:
            return router.choose((), session=request.session, exclude=excluded)
        if self._last is not None and self._last[0] is request.prompt and not request.tried:
            decision = self._last[1]
            if router.is_usable(decision.replica) and decision.replica not in excluded:
                return decision
        found = router.choose(request.hashes, session=request.session, exclude=excluded)
        if found is not None:
            self._on_routed(found.reason)
        return found

    def lacks_adapter(self, request: ReplicatedRequest) -> bool:
        """Return whether there are usable replicas, but none of them has the request's adapter."""
        usable = self._replicas.router.usable
        return bool(usable) and self._without_adapter(request).issuperset(usable)

    def _without_adapter(self, request: ReplicatedRequest) -> set[int]:
        """Return the numbers of the usable replicas that lack the request's adapter."""
        digest = request.options.get("adapter_digest", "")
        if not digest:
            return set()
        return self._replicas.without_adapter(request.options["adapter"], digest)

    def on_sent(self, request: ReplicatedRequest, decision: RoutingDecision) -> None:
        """Count a request that was sent to the replica of `decision`."""
        is_repeated = (
            self._last is not None
            and self._last[0] is request.prompt
            and self._last[1].replica == decision.replica
        )
        is_computed = is_repeated or request.is_prefilled
        num_cached = len(request.prompt) if is_computed else decision.num_cached
        request.num_uncached = len(request.prompt) + len(request.answer) - num_cached
        self._replicas.router.on_sent(
            request.hashes,
            decision.replica,
            request.num_uncached,
            prompt_tokens=len(request.prompt),
            session=request.session,
        )
        request.unanswered = self._replicas.router.loads[decision.replica]
        self._last = request.prompt, decision


def cache_space(options: RoutedOptions) -> str:
    """Return the part of the prefix cache that a request can use: its namespace and adapter."""
    namespace, digest = options.get("namespace", ""), options.get("adapter_digest", "")
    return f"{namespace}\0{digest}" if digest else namespace
