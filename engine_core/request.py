"""A request: one generation in the engine, with its tokens, its progress and what it owns.

There are no prefill and decode phases. A request has `tokens` (its prompt and the sampled tokens)
and K/V for the first `num_computed` of them; a step computes some of the difference. A step that
computes the last known token samples the next one. What the steps in flight will compute and sample
is counted separately, in `num_scheduled` and `num_pending`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING

from engine_core.grammar.matcher import Matcher
from engine_core.policy.accounts import AccountUsage
from engine_core.stage_timer import EngineClock, RequestStage, StageTimer
from protocol.messages import Account, TokenLogprobs
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from engine_core.kv.handle import Handle
    from engine_core.speculation.drafting import RequestDrafting


class RequestPhase(Enum):
    ARRIVED = auto()  # not accepted yet, its grammar may be compiling; owns nothing
    WAITING = auto()  # accepted; owns nothing
    FETCHING = auto()  # owns a slot, and blocks that are being filled by a fetch; in no plan
    READY = auto()  # owns the same; the fetch is over; will be bound with its first plan
    RUNNING = auto()  # owns a slot, and blocks for every known token
    PREEMPTED = auto()  # released slot and blocks; will be computed again
    #: Final; owns nothing once its step in flight has committed, and its fetch is reported.
    FINISHED = auto()


class RequestEvent(Enum):
    ACCEPT = auto()
    FETCH = auto()
    ARRIVE = auto()
    ADMIT = auto()
    PREEMPT = auto()
    FINISH = auto()


NEXT_PHASE = {
    (RequestPhase.ARRIVED, RequestEvent.ACCEPT): RequestPhase.WAITING,
    # aborted, or its grammar was refused
    (RequestPhase.ARRIVED, RequestEvent.FINISH): RequestPhase.FINISHED,
    (RequestPhase.WAITING, RequestEvent.ADMIT): RequestPhase.RUNNING,
    (RequestPhase.WAITING, RequestEvent.FETCH): RequestPhase.FETCHING,
    (RequestPhase.WAITING, RequestEvent.FINISH): RequestPhase.FINISHED,  # aborted before it ran
    (RequestPhase.FETCHING, RequestEvent.ARRIVE): RequestPhase.READY,
    # aborted; its fetch is cancelled
    (RequestPhase.FETCHING, RequestEvent.FINISH): RequestPhase.FINISHED,
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
"""The stage in which the time of a phase is reported."""


@dataclass(slots=True, eq=False)
class Request:
    """One generation. Only the engine and its parts change it."""

    # ---- identity

    #: Identity of its client on the socket.
    client: bytes
    #: The client's number for the request.
    number: int
    #: Position in the order of arrival, kept through preemption.
    order: int
    #: Cached prefixes are shared within it only.
    namespace: str
    #: Prompt tokens, then sampled tokens; int32. Only ever grows.
    tokens: array[int]
    #: How many of `tokens` are the prompt.
    prompt_tokens: int
    #: As sent by the client; `seed` and `max_total_tokens` are resolved.
    params: SamplingParams
    #: Drawn once. With the position it determines every sample, also after a preemption.
    seed: int
    #: Number of known tokens at which it ends with "length".
    max_total_tokens: int
    #: Tokens that end it with "stop".
    stop_ids: frozenset[int]
    #: Changed by `move` only.
    phase: RequestPhase = RequestPhase.ARRIVED

    # ---- order and deadlines, in seconds of the engine's clock

    #: Time of arrival, moved by its priority: the order among the requests of one account.
    queue_time: float = 0.0
    #: Time of arrival, which the deadlines count from.
    arrived_at: float = 0.0
    #: It is too late if it has never had a slot by then.
    start_deadline: float = inf
    #: It is too late if it has not finished by then.
    deadline: float = inf
    #: The worth of its priority against other accounts, in tokens.
    priority_credit: float = 0.0
    #: What its account was served.
    account_usage: AccountUsage = field(default_factory=AccountUsage)

    # ---- slot, blocks and progress

    #: Its row in the worker's buffers; None while it owns none.
    slot: int | None = None
    #: Generation of `slot` while the request owns it.
    slot_generation: int = 0
    #: Block ids of positions [0, len(blocks) * block_tokens).
    blocks: list[int] = field(default_factory=list)
    #: Chained hashes of the first full blocks, computed when first needed.
    hashes: list[bytes] = field(default_factory=list)
    #: Positions whose K/V is in `blocks`. Never exceeds `num_scheduled`.
    num_computed: int = 0
    #: Tokens charged to `account_usage`: those planned, or found in a cache.
    num_charged: int = 0
    #: `num_computed` once every plan in flight has committed, if all drafts are right.
    num_scheduled: int = 0
    #: Tokens that the plans in flight sample. Their values are unknown, their positions are not.
    num_pending: int = 0
    #: Plans in flight that contain the request.
    num_in_flight: int = 0
    #: The draft model computes the request, too.
    uses_draft_model: bool = False
    #: Positions that the draft model has computed once every plan in flight has committed.
    num_draft_computed: int = 0
    #: Blocks offered to the prefix cache.
    num_published: int = 0
    #: Prompt tokens whose K/V was cached or fetched at the first admission.
    num_cached: int = 0
    #: Those of `num_cached` that another engine computed for this request.
    num_fetched: int = 0
    #: How often it lost its slot and blocks.
    num_preemptions: int = 0
    #: Computed since the last admission; sent with the first token.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    # ---- grammar, K/V transfer, labels, drafts

    #: Digest of the grammar that constrains the answer, if any.
    grammar: bytes | None = None
    #: State of the answer in its grammar. Kept through preemption.
    matcher: Matcher | None = None
    #: Readers of its K/V, if only that is requested; 0 for an answer.
    kv_readers: int = 0
    #: Name of the lease for the readers, once it was announced to the worker.
    lease: bytes = b""
    #: Handle of another engine's K/V of its prompt.
    handle: Handle | None = None
    #: Names by which any client may abort it.
    labels: tuple[str, ...] = ()
    #: The account that is charged; None if usage is not limited.
    account: Account | None = None
    #: Its drafter and acceptance rates; None if it gets no drafts.
    drafting: RequestDrafting | None = None
    #: Tokens drafted for it, in all.
    num_drafts: int = 0
    #: Those of `num_drafts` that are in the answer.
    num_accepted: int = 0
    #: Time spent in each stage so far.
    stage_timer: StageTimer = field(default_factory=lambda: StageTimer(EngineClock()))

    @property
    def rank(self) -> tuple[float, int]:
        """Order within an account: a smaller rank is served earlier and preempted later. Unique."""
        return self.queue_time, self.order

    @property
    def virtual_time(self) -> float:
        """Order between accounts: a smaller value is served earlier."""
        return self.account_usage.served + self.priority_credit

    @property
    def name(self) -> str:
        """The name by which any client may abort it: its first label, or client and number."""
        return self.labels[0] if self.labels else f"{self.client.hex()}.{self.number}"

    @property
    def num_ahead(self) -> int:
        """Known tokens once all plans in flight have committed."""
        return len(self.tokens) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens that no plan computes yet. A full answer's last token needs no computation."""
        if self.num_pending and self.num_ahead >= self.max_total_tokens:
            return 0
        return self.num_ahead - self.num_scheduled

    @property
    def num_shareable(self) -> int:
        """Positions whose K/V is complete, also the draft model's if it computes the request."""
        if not self.uses_draft_model:
            return self.num_computed
        return min(self.num_computed, self.num_draft_computed)

    def is_sampled(self, count: int) -> bool:
        """Whether a step that computes `count` more positions samples a token."""
        return self.samples and count >= self.num_uncomputed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def samples(self) -> bool:
        """False if only the prompt is to be computed (max_tokens=0)."""
        return self.max_total_tokens > self.prompt_tokens

    def move(self, event: RequestEvent) -> None:
        """Change the phase. An illegal move raises RuntimeError and changes nothing."""
        phase = NEXT_PHASE.get((self.phase, event))
        if phase is None:
            raise RuntimeError(
                f"request {self.number}: {event.name} is illegal in {self.phase.name}"
            )
        self.phase = phase
        self.stage_timer.enter(STAGES[phase])
