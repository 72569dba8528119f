"""A request: one generation in the engine, with its tokens, its progress and what it owns.

There are no prefill and decode phases. A request has `tokens` (its prompt and the sampled tokens)
and K/V for the first `num_computed` of them. A step computes some of the tokens that still lack
K/V. A step that computes the last known token samples the next one. `num_scheduled` includes the
positions that the steps in flight compute, and `num_pending` counts the tokens that they sample.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, zip_longest
from math import inf

from engine_core.grammar.matcher import Matcher
from engine_core.requests.adapter import EngineAdapter
from engine_core.requests.drafting import RequestDrafting
from engine_core.requests.encode_progress import EncodeProgress
from engine_core.requests.kv_handle import Handle
from engine_core.requests.stage_timer import EngineClock, RequestStage, StageTimer
from engine_core.requests.whole_runs import WholeRuns, last_end, least_end
from protocol.engine.attachments import Attachment
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import Account
from protocol.engine.sampling import SamplingParams
from protocol.machine import Machine
from protocol.worker.steps import NO_CHECKPOINT, NULL_BLOCK


class RequestPhase(Enum):
    ARRIVED = auto()  # not accepted yet; its grammar may be compiling; owns nothing
    WAITING = auto()  # accepted; owns nothing
    FETCHING = auto()  # owns a slot, and blocks that a fetch is filling; is in no plan
    READY = auto()  # the fetch is over; still owns slot and blocks; waits for its first plan
    #: Owns a slot, and blocks for every known token that no window has passed.
    RUNNING = auto()
    PREEMPTED = auto()  # released slot and blocks; waits to be computed again
    #: Final. It owns nothing once its steps in flight have committed and its fetch is reported.
    FINISHED = auto()


class RequestEvent(Enum):
    ACCEPT = auto()
    FETCH = auto()
    ARRIVE = auto()
    ADMIT = auto()
    PREEMPT = auto()
    FINISH = auto()


REQUEST_MACHINE = Machine(
    "request",
    starts=(RequestPhase.ARRIVED,),
    rows={
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
    },
)

STAGES = {
    RequestPhase.ARRIVED: RequestStage.GRAMMAR,
    RequestPhase.WAITING: RequestStage.QUEUE,
    RequestPhase.FETCHING: RequestStage.FETCH,
    RequestPhase.READY: RequestStage.FETCH,
    RequestPhase.RUNNING: RequestStage.PREFILL,
    RequestPhase.PREEMPTED: RequestStage.PREEMPTED,
    RequestPhase.FINISHED: None,
}
"""The timing stage of each phase; None: no time is counted."""


@dataclass(slots=True, eq=False)
class AccountUsage:
    """How much one account has been served: the number of tokens computed for it
    (policy/fair_share.py)."""

    name: str = ""
    #: Computed tokens. `FairShare.on_wait_started` adjusts the number.
    served: float = 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One generation: its tokens, its progress, its slot and its blocks."""

    # ---- identity

    #: Socket identity of the client that sent it.
    client: bytes
    #: Number that the client chose for the request.
    number: int
    #: Serial number in order of arrival. A preempted request keeps it.
    order: int
    #: Cached prefixes are shared only between requests of the same namespace.
    namespace: str
    #: Prompt tokens, then sampled tokens; int32. Only ever grows.
    tokens: array[int]
    #: How many of `tokens` are the prompt.
    prompt_tokens: int
    #: As sent by the client, or `max_tokens=0` if there are `kv_readers`.
    params: SamplingParams
    #: Sent by the client, or drawn on arrival. Seed and position determine each sampled token, so
    #: a preempted request continues with the same tokens.
    seed: int
    #: Number of tokens, prompt included, at which the request ends with "length".
    max_total_tokens: int
    #: Tokens that end the answer with "stop".
    stop_ids: frozenset[int]
    #: Only `move` changes it.
    phase: RequestPhase = RequestPhase.ARRIVED

    # ---- order and deadlines, in seconds of the engine's clock

    #: Time of arrival, shifted by the priority. It orders the requests of one account.
    queue_time: float = 0.0
    #: Time of arrival. The deadlines are relative to it.
    arrived_at: float = 0.0
    #: The request ends with an error if it has never had a slot by this time.
    start_deadline: float = inf
    #: The request ends with an error if it has not finished by this time.
    deadline: float = inf
    #: Tokens added to its account's service when it is compared with requests of other accounts.
    #: It follows from the priority; negative: the request goes earlier.
    priority_credit: float = 0.0
    #: Tokens that its account was served; shared by all requests of the account.
    account_usage: AccountUsage = field(default_factory=AccountUsage)

    # ---- slot, blocks and progress

    #: Row in the worker's buffers; None while the request owns none.
    slot: int | None = None
    #: Generation of `slot` while the request owns it.
    slot_generation: int = 0
    #: Block ids of positions [0, len(blocks) * block_tokens). The first `num_passed` are the null
    #: block, except if there are `window_tables`.
    blocks: list[int] = field(default_factory=list)
    #: With K/V groups, the block ids of the layers with a window: one list for each of a column's
    #: window blocks, with one id per column. The first `num_passed` ids are the null block.
    #: `blocks` then holds the blocks of the other layers. All lists have the same length, at most
    #: `len(blocks)`.
    window_tables: list[list[int]] = field(default_factory=list)
    #: Number of leading blocks that the model's window has passed. The request has released them.
    num_passed: int = 0
    #: Number of leading columns whose blocks for the layers without a window were cached when the
    #: request was admitted, although blocks in the window after them, or a checkpoint of the state
    #: after them, were missing; 0: none were missing. Other prompts have the same beginning, so the
    #: request keeps this window in the prefix cache, and a checkpoint there.
    num_shared_columns: int = 0
    #: How many of `num_passed` are the null block in the worker's block table too.
    num_passed_sent: int = 0
    #: Chained hashes of the first full blocks. The list is extended when a hash is needed.
    hashes: list[bytes] = field(default_factory=list)
    #: State of Mirostat after the last of `tokens` (`SlotInit.mirostat_mu`); 0 without Mirostat.
    mirostat_mu: float = 0.0
    #: Positions whose K/V is in `blocks`. Never exceeds `num_scheduled`.
    num_computed: int = 0
    #: Positions that were charged to `account_usage` when planned, or were found in a cache. No
    #: position is charged twice.
    num_charged: int = 0
    #: `num_computed` once every plan in flight has committed, if all drafts are right.
    num_scheduled: int = 0
    #: Tokens that the plans in flight sample. Their positions are known, their values are not.
    num_pending: int = 0
    #: Number of plans in flight that contain the request.
    num_in_flight: int = 0
    #: Whether the draft model computes the request as well.
    uses_draft_model: bool = False
    #: Positions that the draft model or head will have computed once every plan in flight has
    #: committed, or that the head cannot compute any more.
    num_draft_computed: int = 0
    #: Whether the model's own head computes the request as well.
    uses_head: bool = False
    #: Number of leading blocks that were published in the prefix cache.
    num_published: int = 0
    #: The checkpoints that the request holds, by the number of leading positions whose recurrent
    #: state they contain. Those beyond `num_computed` are saved by a step in flight, filled by the
    #: request's fetch, or reserved for the end of a request with `kv_readers`.
    checkpoints: dict[int, int] = field(default_factory=dict)
    #: One more checkpoint that the request holds; NO_CHECKPOINT: none. It is the one that the
    #: request starts with, from its fetch to its first plan. Once its lease is announced, it is
    #: that of the lease.
    kept_checkpoint: int = NO_CHECKPOINT
    #: Prompt tokens whose K/V was cached or fetched at the first admission.
    num_cached: int = 0
    #: How many of `num_cached` another engine computed for this request.
    num_fetched: int = 0
    #: How often the request lost its slot and blocks.
    num_preemptions: int = 0
    #: Logprobs of prompt tokens, collected over the prompt's chunks and sent with the first token.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    # ---- grammar, K/V transfer, labels, drafts

    #: Digest of the grammar that constrains the answer, if any.
    grammar: bytes | None = None
    #: State of the answer in its grammar. Kept through preemption.
    matcher: Matcher | None = None
    #: Number of engines that will read the prompt's K/V; 0 if the request generates an answer.
    kv_readers: int = 0
    #: The LoRA adapter that computes the request; None: the model alone.
    adapter: EngineAdapter | None = None
    #: Name of the lease for the readers; empty until it is announced to the worker.
    lease: bytes = b""
    #: Names the K/V that another engine has computed for the prompt.
    handle: Handle | None = None
    #: Names by which any client may abort the request.
    labels: tuple[str, ...] = ()
    #: The account that is charged, and its limits; None if usage is not limited.
    account: Account | None = None
    #: Drafter and acceptance rates; None if the request gets no drafts.
    drafting: RequestDrafting | None = None
    #: The images in the prompt, in the order of their positions.
    images: tuple[Attachment, ...] = ()
    #: Positions that a step computes as a whole: those of the images, in some models.
    whole_runs: WholeRuns = ()
    #: Total number of drafts that were verified for the request.
    num_drafts: int = 0
    #: How many of `num_drafts` became part of the answer.
    num_accepted: int = 0
    #: The inputs and results of a request that encodes (encode/scheduler.py); None: it generates. A
    #: request that encodes never owns a slot or blocks.
    encode: EncodeProgress | None = None
    #: Time spent in each stage so far.
    stage_timer: StageTimer = field(default_factory=lambda: StageTimer(EngineClock()))

    @property
    def adapter_digest(self) -> str:
        """Digest of the request's adapter; "" if it has none."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key within an account. A smaller rank is served earlier and preempted later. No two
        requests have the same rank."""
        return self.queue_time, self.order

    @property
    def virtual_time(self) -> float:
        """Sort key between accounts, in tokens: the account's service, changed by the request's
        priority (policy/fair_share.py). A request with a smaller value goes earlier."""
        return self.account_usage.served + self.priority_credit

    @property
    def name(self) -> str:
        """The name of the request in EngineStatus, by which an AbortByLabel from any client can end
        it: its first label, or else "<client in hex>.<number>"."""
        return self.labels[0] if self.labels else f"{self.client.hex()}.{self.number}"

    @property
    def held_blocks(self) -> list[int]:
        """The blocks that the request holds: all except those that the window has passed."""
        if not self.window_tables:
            return self.blocks[self.num_passed :]
        tables = (table[self.num_passed :] for table in self.window_tables)
        return [*self.blocks, *chain.from_iterable(tables)]

    @property
    def held_checkpoints(self) -> list[int]:
        """The checkpoints that the request holds. It may hold one twice."""
        return [*self.checkpoints.values(), *filter(None, [self.kept_checkpoint])]

    def held_until(self, column: int) -> list[int]:
        """Return those of `held_blocks` that are in the first `column` columns."""
        blocks, tables, first = self.blocks, self.window_tables, self.num_passed
        if not tables:
            return blocks[first:column]
        return [*blocks[:column], *(block for table in tables for block in table[first:column])]

    def held_after(self, column: int) -> list[int]:
        """Return those of `held_blocks` that are not in the first `column` columns."""
        blocks, tables, first = self.blocks, self.window_tables, max(self.num_passed, column)
        if not tables:
            return blocks[first:]
        return [*blocks[column:], *(block for table in tables for block in table[first:])]

    @property
    def block_table(self) -> list[int]:
        """The entries of the request's block table in the worker (`KVGroups`)."""
        if not self.window_tables:
            return self.blocks
        columns = zip_longest(self.blocks, *self.window_tables, fillvalue=NULL_BLOCK)
        return list(chain.from_iterable(columns))

    @property
    def num_ahead(self) -> int:
        """Number of known tokens once all plans in flight have committed."""
        return len(self.tokens) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens, pending ones included, that are in no plan and not computed. It is 0 if
        the pending tokens complete the answer, whose last token need not be computed."""
        if self.num_pending and self.num_ahead >= self.max_total_tokens:
            return 0
        return self.num_ahead - self.num_scheduled

    @property
    def num_shareable(self) -> int:
        """Number of leading positions whose K/V may be published in the prefix cache. If the draft
        model computes the request, the draft model's K/V must exist too."""
        if not self.uses_draft_model:
            return self.num_computed
        return min(self.num_computed, self.num_draft_computed)

    @property
    def least_end(self) -> int:
        """The end of the shortest chunk that can be computed next: it has one position, or a run
        that is computed as a whole."""
        start = self.num_scheduled
        return least_end(self.whole_runs, start) if self.whole_runs else start + 1

    def last_end(self, position: int) -> int:
        """Return the last position, at most `position`, at which a chunk or a cached prefix may
        end: the start of a run that is computed as a whole, if `position` is inside one."""
        return last_end(self.whole_runs, position) if self.whole_runs else position

    def is_sampled(self, count: int) -> bool:
        """Return whether a step that computes `count` more positions samples a token."""
        return self.samples and count >= self.num_uncomputed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def samples(self) -> bool:
        """Whether the request samples tokens. If not, only its prompt is computed."""
        return self.max_total_tokens > self.prompt_tokens

    def move(self, event: RequestEvent) -> None:
        """Change the phase. Raises IllegalMove and changes nothing if it does not admit `event`."""
        self.phase = REQUEST_MACHINE.move(self.phase, event, subject=self.number)
        self.stage_timer.enter(STAGES[self.phase])
