"""Engines that are replicas of each other: which are usable, their model, and how busy they are.

The engines of one model are replicas, or the prefill engines of a split server are, and so are its
decode engines. A replica is usable if it is ready, does not drain, and is still in the list of
engines. The router (`routing.py`) chooses among the usable ones. `engine_fleet.py` sends requests
to them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from gateway.engine.client import ConnectedEngine, ZmqEngineClient
from gateway.engine.refusal_cache import RefusalCache
from gateway.fleet.engine_list import EngineList
from gateway.fleet.paired_numerics import PairedNumerics
from gateway.fleet.routing import PrefixRouter
from protocol.engine.account_limits import LIMITS, has_part
from protocol.engine.messages import Account, Limits
from protocol.engine.model_card import ModelCard
from protocol.engine.stats import EngineLoad
from protocol.wire.errors import EngineNotReady, ServingError

log = logging.getLogger(__name__)

REFRESH_S = 0.01
"""The states of the replicas are read at most this often. A request that is sent to a replica which
has just been lost is sent to another one."""


@dataclass(slots=True, eq=False)
class ConnectedReplica:
    """The client of one replica, with the cached refusals and the router's data about it."""

    client: ZmqEngineClient
    refusals: RefusalCache = field(default_factory=RefusalCache)
    #: The replica's number in the router; None before its first session.
    number: int | None = None
    #: The epoch of the engine that has this number. A restarted engine has an empty cache.
    epoch: str | None = None
    #: Whether the address is no longer in the list of engines.
    is_retired: bool = False

    @property
    def digest(self) -> str:
        """The digest of the replica's model; "" before its first session."""
        card = self.client.model
        return "" if card is None else card.digest


class ReplicaSet:
    """The replicas in the list of engines.

    engines      the addresses of the replicas, which may change
    new_client   returns a client for an address
    role         "replica", "prefill" or "decode"
    numerics     compares the replicas with each other, and with those of another set that has it
    """

    def __init__(
        self,
        engines: EngineList,
        new_client: Callable[[str], ZmqEngineClient],
        role: str,
        numerics: PairedNumerics,
    ) -> None:
        self.router = PrefixRouter()
        #: Digest of the model that is served: that of most usable replicas. While replicas are
        #: replaced by ones with another model, requests for the old model stay on the old ones.
        self.digest = ""
        self._engines, self._new_client = engines, new_client
        self._role, self._name = role, role if role == "replica" else f"{role} engine"
        self._replicas: dict[str, ConnectedReplica] = {}  # by address
        self._by_number: dict[int, ConnectedReplica] = {}
        self._numerics = numerics
        self._compared: dict[str, ModelCard] = {}  # address -> the card that was compared last
        #: A replica that serves `digest`; the last one while none is usable.
        self._first: ConnectedReplica | None = None
        #: Numbers of the usable replicas with another model than `digest`.
        self._others: frozenset[int] = frozenset()
        self._refreshed_at = float("-inf")
        self._is_started = False
        self.update_list(())

    def start(self) -> None:
        self._is_started = True
        for replica in self._replicas.values():
            replica.client.start()

    def close(self) -> None:
        for replica in self._replicas.values():
            replica.client.close()

    def update_list(self, in_use: Collection[ConnectedReplica | None]) -> None:
        """Connect to engines that are new in the list, and leave those that are not in it any more.

        in_use   the replicas with open requests, which are left later
        """
        wanted = self._engines.poll()
        for address in wanted:
            replica = self._replicas.get(address)
            if replica is None:
                client = self._new_client(address)
                replica = self._replicas[address] = ConnectedReplica(client)
                client.on_load = partial(self._on_load, replica)
                if self._is_started:
                    log.info("a new %s: %s", self._name, address)
                    client.start()
            replica.is_retired = False
        for address, replica in list(self._replicas.items()):
            if address in wanted:
                continue
            if not replica.is_retired:
                log.info("the %s %s gets no new requests", self._name, address)
                replica.is_retired = True
            if replica not in in_use:
                self._forget(replica)
                del self._replicas[address]
                self._first = None if self._first is replica else self._first
                replica.client.close()
        self.invalidate()

    # ---- the state of the replicas

    def invalidate(self) -> None:
        """Read the states of the replicas at the next use, because one has just changed."""
        self._refreshed_at = float("-inf")

    def refresh(self) -> None:
        """Read which replicas are usable, unless that was done just before."""
        now = time.monotonic()
        if now - self._refreshed_at < REFRESH_S:
            return
        self._refreshed_at = now
        usable = [replica for replica in self._replicas.values() if self._update(replica)]
        digests = Counter(replica.digest for replica in usable)
        if digests and digests[self.digest] < max(digests.values()):
            self.digest = digests.most_common(1)[0][0]
        self._first = next((r for r in usable if r.digest == self.digest), self._first)
        self._others = frozenset(
            r.number for r in usable if r.number is not None and r.digest != self.digest
        )

    def _update(self, replica: ConnectedReplica) -> bool:
        """Update a replica in the router. Return whether it is usable."""
        client = replica.client
        is_usable = client.is_ready and not replica.is_retired
        if is_usable and replica.epoch != client.epoch:
            self._forget(replica)
            limits = client.limits
            assert limits is not None
            size = limits.num_blocks * limits.block_tokens if limits.prefix_cache else 0
            replica.epoch, replica.number = client.epoch, self.router.add(client.address, size)
            self._by_number[replica.number] = replica
        if replica.number is not None:
            self.router.set_usable(replica.number, is_usable=is_usable)
        card = client.model
        if card is not None and card is not self._compared.get(client.address):
            self._compared[client.address] = card
            self._numerics.add(f"the {self._name} {client.address}", card)
        return is_usable

    def _forget(self, replica: ConnectedReplica) -> None:
        """Remove a replica from the router."""
        if replica.number is not None:
            self.router.remove(replica.number)
            del self._by_number[replica.number]
            replica.number = None

    def _on_load(self, replica: ConnectedReplica, load: EngineLoad) -> None:
        if replica.number is not None:
            self.router.loads[replica.number].on_report(load)

    def __iter__(self) -> Iterator[ConnectedReplica]:
        """Iterate over all replicas, in the order of the list."""
        return iter(self._replicas.values())

    def get(self, number: int) -> ConnectedReplica:
        """Return the replica with this number in the router."""
        return self._by_number[number]

    @property
    def usable(self) -> list[ConnectedReplica]:
        return [self._by_number[number] for number in self.router.usable]

    @property
    def connections(self) -> list[ConnectedEngine]:
        return [ConnectedEngine(self._role, replica.client) for replica in self]

    # ---- what is reported of all replicas together

    @property
    def shown(self) -> ZmqEngineClient | None:
        """The replica whose state is reported as that of the server: a usable one if there is one.
        None if the list of engines is empty."""
        self.refresh()
        if self._first is not None and self._first.client.is_ready:
            return self._first.client
        clients = [replica.client for replica in self]
        return next((c for c in clients if c.model is not None), next(iter(clients), None))

    def trouble(self) -> ServingError | None:
        """Return why no request can be sent now; None if one can."""
        self.refresh()
        if len(self.router.usable) > len(self._others):
            return None
        for replica in self:
            if (trouble := replica.client.trouble()) is not None:
                return type(trouble)(trouble.message, retry_after_s=trouble.retry_after_s)
        return EngineNotReady("there is no engine yet", retry_after_s=1)

    @property
    def model(self) -> ModelCard | None:
        """The served model, without `numerics` if the replicas differ in it."""
        shown = self.shown
        card = None if shown is None else shown.model
        return None if card is None else self._numerics.promised(card)

    @property
    def limits(self) -> Limits | None:
        """The limits of the usable replica with the smallest context."""
        self.refresh()
        found = [r.client.limits for r in self.usable if r.client.limits is not None]
        shown = self.shown
        return min(
            found,
            key=lambda limits: limits.max_len,
            default=None if shown is None else shown.limits,
        )

    @property
    def silence_s(self) -> float | None:
        """Seconds since the last message of any usable replica."""
        self.refresh()
        shown = self.shown
        clients = [r.client for r in self.usable] or ([] if shown is None else [shown])
        found = [client.silence_s for client in clients]
        return min((seconds for seconds in found if seconds is not None), default=None)

    # ---- which replicas may serve a request

    def unfit(self, digest: str, account: Account | None) -> set[int]:
        """Return the numbers of the usable replicas that must not get a new request: those with
        another model, those that have just refused the account, and those without a part of its
        limits.

        digest   the model of the request
        """
        unfit = self.unfit_to_continue(digest)
        has_limits = account is not None and any(getattr(account, name) for name in LIMITS)
        if not has_limits and not any(len(replica.refusals) for replica in self):
            return unfit
        now, numbers = time.monotonic(), sorted(self.router.usable)
        for part, number in enumerate(numbers):
            is_refused = self._by_number[number].refusals.get(account, now) is not None
            if is_refused or (account is not None and not has_part(account, part, len(numbers))):
                unfit.add(number)
        return unfit

    def unfit_to_continue(self, digest: str) -> set[int]:
        """Return the numbers of the usable replicas that cannot continue a request for a model."""
        if digest == self.digest:
            return set(self._others)
        return {number for number in self.router.usable if self._by_number[number].digest != digest}

    def without_adapter(self, name: str, digest: str) -> set[int]:
        """Return the numbers of the usable replicas that do not have this adapter."""
        return {
            number
            for number in self.router.usable
            if (name, digest)
            not in [(info.name, info.digest) for info in self._by_number[number].client.adapters]
        }

    def part_of(self, account: Account, replica: ConnectedReplica) -> Account:
        """Return the account with the part of its limits that this usable replica enforces."""
        numbers = sorted(self.router.usable)
        assert replica.number is not None
        return replace(account, part=numbers.index(replica.number), parts=len(numbers))

    def cached_refusal(self, account: Account | None) -> ServingError | None:
        """Return the refusal with the shortest wait if every usable replica has refused this
        account and would do so again; otherwise None."""
        self.refresh()
        now = time.monotonic()
        usable = self.usable
        if not usable or any(r.refusals.get(account, now) is None for r in usable):
            return None
        usable[0].client.count_cached_refusal()
        return self.shortest_refusal(account)

    def shortest_refusal(self, account: Account | None) -> ServingError | None:
        """Return the refusal of this account with the shortest wait that a usable replica holds."""
        now = time.monotonic()
        found = [replica.refusals.get(account, now) for replica in self.usable]
        held = [refusal for refusal in found if refusal is not None]
        return min(held, key=lambda refusal: refusal.retry_after_s or 0.0, default=None)
