"""One open request of several engines: what was sent, where it is, and its answer so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from gateway.engine.base import (
    Report,
    RequestSender,
    RoutedEncodeOptions,
    RoutedOptions,
    Subscriber,
)
from gateway.fleet.failover import Failover
from gateway.fleet.replica_set import ConnectedReplica
from gateway.fleet.routing import PrefixHash, ReplicaLoad
from protocol.engine.encoding import EncodeInputs
from protocol.engine.messages import Refused, Usage
from protocol.engine.sampling import SamplingParams
from protocol.engine.timeline import AbortReason
from protocol.wire.arrays import Int32
from protocol.wire.errors import (
    Draining,
    EngineLost,
    EngineNotReady,
    LimitReached,
    Overloaded,
    QueueTimeout,
    StaleAdapter,
)

BUSY_CODES = frozenset(
    kind.code
    for kind in (
        Overloaded,
        LimitReached,
        QueueTimeout,
        Draining,
        EngineNotReady,
        EngineLost,
        StaleAdapter,
    )
)
"""Codes of refusals that hold for one replica only."""


@dataclass(slots=True, eq=False)
class ReplicatedRequest:
    """A caller's open request."""

    #: The number that `generate` returned to the caller.
    number: int
    prompt: Int32
    params: SamplingParams
    subscriber: Subscriber
    options: RoutedOptions
    hashes: list[PrefixHash]
    #: The session's name, with its namespace; "": none.
    session: str
    #: Digest of the model that computes the request.
    digest: str
    #: The inputs of a request that encodes, whose tokens `prompt` has; None: it generates.
    inputs: EncodeInputs | None = None
    failover: Failover = field(default_factory=Failover)
    #: The replica that has the request, and the request's number there.
    replica: ConnectedReplica | None = None
    inner: int = 0
    #: The load of that replica, if it has not answered the request yet, and what it counts.
    unanswered: ReplicaLoad | None = None
    num_uncached: int = 0
    #: Numbers of replicas that have refused the request, or were lost with it.
    tried: set[int] = field(default_factory=set)
    #: Tokens of the answer that the caller has received.
    answer: list[int] = field(default_factory=list)
    #: `Output.mirostat_mu` after these tokens.
    mirostat_mu: float | None = None
    num_losses: int = 0
    #: How many engines were lost before while they computed its prompt only.
    num_lost_before: int = 0
    first_usage: Usage | None = None
    #: The report that is emitted if no replica takes the request.
    refusal: Report | None = None
    #: Whether `abort_by_label` has named the request, so that it must not be moved.
    is_stopped: bool = False
    #: Whether it was therefore ended here, because no replica had it.
    has_been_stopped: bool = False
    arrived_at: float = field(default_factory=time.monotonic)
    #: When the request was first sent to a replica, and whether that was later than its arrival.
    sent_at: float = field(default_factory=time.monotonic)
    is_late: bool = False
    stranded_at: float = 0.0
    #: The arguments of `abort`.
    abort_reason: AbortReason = ""
    on_freed: Callable[[], None] | None = None

    @property
    def labels(self) -> set[str]:
        return set(self.options.get("labels", []))

    @property
    def is_prefilled(self) -> bool:
        """Whether a prefill engine has computed the prompt, and still keeps its K/V."""
        return bool(self.options.get("kv_handle"))

    def on_answered(self, *, is_accepted: bool) -> None:
        """Update the load of the replica that the request was sent to."""
        load, self.unanswered = self.unanswered, None
        if load is not None:
            load.on_answered(self.num_uncached, is_accepted=is_accepted)

    def send(self, engine: RequestSender, on_report: Subscriber, options: RoutedOptions) -> int:
        """Send the request to the engine of a replica, and return its number there."""
        if self.inputs is None:
            return engine.generate(self.prompt, self.params, on_report, **options)
        is_moved = options.pop("answer", None) is not None
        own = cast(RoutedEncodeOptions, options)
        own["is_moved"] = is_moved
        return engine.encode(self.inputs, on_report, **own)


def shorter_wait(known: Report | None, refused: Refused) -> Report:
    """Return the refusal with the shorter wait."""
    if not isinstance(known, Refused):
        return refused
    waits = [each.error.retry_after_s or 0.0 for each in (known, refused)]
    return known if waits[0] <= waits[1] else refused
