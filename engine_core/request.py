"""One generation in the engine: what is known, what is computed, what it owns.

There are no prefill and decode phases. A request knows `tokens` (its prompt and what was sampled)
and has K/V for the first `num_computed` of them; a step computes some of the difference. Sampling
happens when a step computes the last known token. While a step is out, what it will compute and
sample is counted apart: `num_scheduled`, `num_pending`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING

from engine_core.grammar.matcher import Matcher
from engine_core.policy.fair_share import AccountUsage
from engine_core.stage_timer import EngineClock, RequestStage, StageTimer
from protocol.messages import Account, TokenLogprobs
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from engine_core.kv.handle import Handle
    from engine_core.speculation.drafting import RequestDrafting


class RequestPhase(Enum):
    ARRIVED = auto()  # not accepted yet, its grammar may be being compiled; owns nothing
    WAITING = auto()  # accepted; owns nothing
    FETCHING = auto()  # owns a slot, and blocks into which K/V comes from elsewhere; in no plan
    READY = auto()  # owns the same; all has come that will come; bound with its first plan
    RUNNING = auto()  # owns a slot, and blocks for every known token
    PREEMPTED = auto()  # gave slot and blocks back; will be computed again
    FINISHED = auto()  # final; owns nothing, or only until the step in flight has committed,
    # or the worker has reported on its fetch


class RequestEvent(Enum):
    ACCEPT = auto()
    FETCH = auto()
    ARRIVE = auto()
    ADMIT = auto()
    PREEMPT = auto()
    FINISH = auto()


NEXT_PHASE = {
    (RequestPhase.ARRIVED, RequestEvent.ACCEPT): RequestPhase.WAITING,
    (
        RequestPhase.ARRIVED,
        RequestEvent.FINISH,
    ): RequestPhase.FINISHED,  # aborted, or its grammar was refused
    (RequestPhase.WAITING, RequestEvent.ADMIT): RequestPhase.RUNNING,
    (RequestPhase.WAITING, RequestEvent.FETCH): RequestPhase.FETCHING,
    (RequestPhase.WAITING, RequestEvent.FINISH): RequestPhase.FINISHED,  # aborted before it ran
    (RequestPhase.FETCHING, RequestEvent.ARRIVE): RequestPhase.READY,
    (
        RequestPhase.FETCHING,
        RequestEvent.FINISH,
    ): RequestPhase.FINISHED,  # aborted, its fetch is given up
    (RequestPhase.READY, RequestEvent.ADMIT): RequestPhase.RUNNING,
    (RequestPhase.READY, RequestEvent.FINISH): RequestPhase.FINISHED,
    (RequestPhase.RUNNING, RequestEvent.PREEMPT): RequestPhase.PREEMPTED,
    (RequestPhase.RUNNING, RequestEvent.FINISH): RequestPhase.FINISHED,
    (RequestPhase.PREEMPTED, RequestEvent.ADMIT): RequestPhase.RUNNING,
    (RequestPhase.PREEMPTED, RequestEvent.FETCH): RequestPhase.FETCHING,
    (RequestPhase.PREEMPTED, RequestEvent.FINISH): RequestPhase.FINISHED,
}
"""A missing row is an illegal move."""

STAGES = {
    RequestPhase.ARRIVED: RequestStage.GRAMMAR,
    RequestPhase.WAITING: RequestStage.QUEUE,
    RequestPhase.FETCHING: RequestStage.FETCH,
    RequestPhase.READY: RequestStage.FETCH,
    RequestPhase.RUNNING: RequestStage.PREFILL,
    RequestPhase.PREEMPTED: RequestStage.PREEMPTED,
    RequestPhase.FINISHED: None,
}
"""As what the time in a phase is told."""


@dataclass(slots=True, eq=False)
class Request:
    """`order` is the place in the order of arrival, kept through preemption.

    client, number   who asked, and the client's number for it
    place            when it came, in seconds, later or earlier for its priority; the order among
                     the requests of one account
    arrived_at       in seconds of the engine's clock
    begin_by         it has no slot by then: too late;  end_by  has not ended
    lead             what its priority is worth against other accounts, in tokens
    share            whose it is, and what this one was served
    tokens           [known] int32: prompt, then sampled
    seed             drawn once; with the position it determines every sample, in any life of the
                     request
    end              number of known tokens at which it ends with "length"
    stop_ids         tokens that end it with "stop"
    blocks           block ids of positions [0, len(blocks) * block_tokens)
    hashes           chained hashes of the first full blocks, computed when first needed
    num_paid         of its tokens, counted in `share` when they were planned, or found
    num_scheduled    like num_computed, when the plans that are out will have been committed, if all
                     their drafts are right
    num_pending      tokens that those plans sample: not known here, but where they will stand is
    num_in_flight    how many plans that are out have a row of it
    follows          a draft model computes it, too
    num_followed     how many of its tokens, when the plans that are out will have been committed
    num_published    how many of its blocks have been offered to the prefix cache
    num_cached       prompt tokens whose K/V was found, or fetched, at the first admission
    num_fetched      how many of these another engine has computed for it
    prompt_logprobs  as computed so far in this life; told with the first token
    grammar          digest of the grammar that constrains the answer, if one does
    matcher          where the answer is in that grammar, whatever becomes of slot and blocks
    kv_readers       who will go on from its K/V, which is all that is wanted; 0 for an answer
    lease            of its K/V, for readers, once the worker has been told of it
    handle           what other engine has K/V of its prompt
    labels           names by which any client may abort it
    account          who pays for it; None: nobody counts
    guesses          its drafts and how right they were; None where it gets none
    num_drafts       tokens drafted for it, in all;  num_accepted  of these, in the answer
    watch            where its time goes
    """

    client: bytes
    number: int
    order: int
    namespace: str
    tokens: array[int]
    prompt_tokens: int
    params: SamplingParams
    seed: int
    end: int
    stop_ids: frozenset[int]
    phase: RequestPhase = RequestPhase.ARRIVED
    place: float = 0.0
    arrived_at: float = 0.0
    begin_by: float = inf
    end_by: float = inf
    lead: float = 0.0
    share: AccountUsage = field(default_factory=AccountUsage)
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_charged: int = 0
    num_scheduled: int = 0
    num_pending: int = 0
    num_in_flight: int = 0
    follows: bool = False
    num_followed: int = 0
    num_published: int = 0
    num_cached: int = 0
    num_fetched: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    grammar: bytes | None = None
    matcher: Matcher | None = None
    kv_readers: int = 0
    lease: bytes = b""
    handle: Handle | None = None
    labels: tuple[str, ...] = ()
    account: Account | None = None
    guesses: RequestDrafting | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    watch: StageTimer = field(default_factory=lambda: StageTimer(EngineClock()))

    @property
    def rank(self) -> tuple[float, int]:
        """Who goes first in an account: smaller is served earlier, and anywhere preempted later.
        Unique."""
        return self.place, self.order

    @property
    def due(self) -> float:
        """Whose account goes first: smaller is served earlier."""
        return self.share.served + self.lead

    @property
    def name(self) -> str:
        """By which anybody may abort it: its first label, or its client and number."""
        return self.labels[0] if self.labels else f"{self.client.hex()}.{self.number}"

    @property
    def num_ahead(self) -> int:
        """Tokens that will be known when all plans that are out have been committed."""
        return len(self.tokens) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens that no plan computes yet. A full answer's last token needs no computation."""
        if self.num_pending and self.num_ahead >= self.end:
            return 0
        return self.num_ahead - self.num_scheduled

    @property
    def num_shareable(self) -> int:
        """Positions that whoever finds their blocks has nothing left to compute for."""
        return min(self.num_computed, self.num_followed) if self.follows else self.num_computed

    def is_sampled(self, count: int) -> bool:
        """Whether a step that computes so many more positions samples a token."""
        return self.samples and count >= self.num_uncomputed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def samples(self) -> bool:
        """False for a request that only wants its prompt computed (max_tokens=0)."""
        return self.end > self.prompt_tokens

    def move(self, event: RequestEvent) -> None:
        """Raises RuntimeError on an illegal move and changes nothing."""
        phase = NEXT_PHASE.get((self.phase, event))
        if phase is None:
            raise RuntimeError(
                f"request {self.number}: {event.name} is illegal in {self.phase.name}"
            )
        self.phase = phase
        self.watch.enter(STAGES[phase])
