"""The state of an engine as plain data: `EngineSnapshot` and its parts.

Every file of a journal except the first starts with a snapshot. `capture` makes it from an engine,
and `restore` makes an engine from it. Shared objects are listed once and referred to by their
index: requests in `EngineSnapshot.requests`, accounts in `EngineSnapshot.usages`. Data that follow
from other data are not stored. The configuration of the engine is in the StartRecord.

A new attribute of the engine or its parts must be added here, in `capture` and in `restore` if a
decision depends on it, and then `records.FORMAT` must be increased. `tests/unit/test_snapshot.py`
lists the stored attributes, and the reasons why the others are not stored.
"""

from __future__ import annotations

import msgspec

from engine_core.grammar.jobs import CompileJob
from engine_core.kv.fetches import FetchState, Match
from engine_core.kv.tiers import Tier
from engine_core.policy.accounts import AccountBuckets
from engine_core.policy.throughput import Throughput
from engine_core.requests.adapter import AdapterState
from engine_core.requests.drafting import AcceptanceTally
from engine_core.requests.encode_progress import EncodeProgress
from engine_core.requests.request import AccountUsage, RequestPhase
from engine_core.requests.stage_timer import RequestStage
from engine_core.requests.whole_runs import WholeRuns
from engine_core.speculation.overhead import StepTimes
from protocol.engine.attachments import Attachment
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import Account
from protocol.engine.sampling import SamplingParams
from protocol.worker.steps import SlotRelease


class SnapshotPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the structs in an EngineSnapshot. Decoding fails if a field is missing or
    unknown."""


class DraftingSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of a request's `RequestDrafting`."""

    #: Number of positions in the n-gram index; None if the drafts come from the draft model.
    num_indexed: int | None
    #: Number of known tokens when the draft model proposed `proposed`.
    num_known: int
    proposed: list[int]
    tally: AcceptanceTally
    forced_tally: AcceptanceTally
    awaited_guess: int | None
    is_forced: bool


class StageSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of a request's `StageTimer`."""

    stage: RequestStage | None
    since: float
    spent: dict[str, float]
    has_token: bool


class RequestSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of a `Request`. Its fields have the same meaning, except for those with a comment.

    Fields that are used only in a cluster are left out, because an engine of a cluster has no
    journal.
    """

    client: bytes
    number: int
    order: int
    namespace: str
    #: The tokens as little-endian int32.
    tokens: bytes
    prompt_tokens: int
    params: SamplingParams
    seed: int
    max_total_tokens: int
    stop_ids: frozenset[int]
    phase: RequestPhase
    queue_time: float
    arrived_at: float
    start_deadline: float
    deadline: float
    priority_credit: float
    #: Index in `EngineSnapshot.usages`.
    account_usage: int
    #: Index in `EngineSnapshot.adapters`; None: no adapter.
    adapter: int | None
    slot: int | None
    slot_generation: int
    blocks: list[int]
    window_tables: list[list[int]] = []
    num_passed: int
    num_passed_sent: int
    num_shared_columns: int
    hashes: list[bytes]
    mirostat_mu: float
    num_computed: int
    num_charged: int
    num_scheduled: int
    num_pending: int
    num_in_flight: int
    uses_draft_model: bool
    num_draft_computed: int
    uses_head: bool
    num_published: int
    checkpoints: dict[int, int]
    kept_checkpoint: int
    num_cached: int
    num_fetched: int
    num_preemptions: int
    prompt_logprobs: list[TokenLogprobs]
    grammar: bytes | None
    #: Whether the request has a matcher. If so, the matcher has consumed all tokens of the answer.
    has_matcher: bool
    labels: tuple[str, ...]
    account: Account | None
    images: tuple[Attachment, ...]
    whole_runs: WholeRuns
    drafting: DraftingSnapshot | None
    num_drafts: int
    num_accepted: int
    encode: EncodeProgress | None
    stage_timer: StageSnapshot


class ImagesSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of `ImageRows` and its `AttachmentContent`, without the content itself."""

    #: Digest -> size in bytes, and number of rows.
    held: dict[str, tuple[int, int]]
    rejected: list[str]
    kept: dict[str, int]
    encoding: list[str]
    num_encoded: int
    num_encoded_rows: int
    num_hits: int
    encode_s: float


class StepSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of an `InflightStep`."""

    #: The frames of the StepPlan.
    plan: list[bytes]
    #: (index of the request, number of positions) of each row.
    rows: list[tuple[int, int]]
    needs_masks: bool
    num_requested_drafts: int


class EncodeStepSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of an `EncodeStep`."""

    #: The frames of the EncodePlan.
    plan: list[bytes]
    #: (index of the request, number of inputs) of each part.
    parts: list[tuple[int, int]]


class EncodingSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `EncodeScheduler`.

    Requests are given by their indexes in `EngineSnapshot.requests`.
    """

    #: Account by account, each account's requests by rank.
    waiting: list[int]
    #: Client that must read first -> its waiting requests, as in `waiting`.
    held: dict[bytes, list[int]]
    started: list[int]
    #: Requests whose results are computed and not sent, in the order in which they will be.
    unsent: list[int]
    #: Steps in flight, oldest first.
    inflight: list[EncodeStepSnapshot]
    num_open: int
    debt: int
    continues: bool


class CachedGrammarSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of a `CachedGrammar`. Its users are the open requests that have a matcher."""

    digest: bytes
    num_bytes: int
    has_failed: bool


class PendingGrammarSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of a `PendingGrammar`."""

    num_chars: int
    accounts: list[str]
    #: Indexes in `EngineSnapshot.requests`.
    requests: list[int]


class AdmissionSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `Admission` and its grammars."""

    is_draining: bool
    num_accepted: int
    num_refused: int
    order: int
    #: Compile jobs that the loop has not fetched yet.
    jobs: list[CompileJob]
    #: The compiled grammars, least recently used first.
    cached: list[CachedGrammarSnapshot]
    #: The grammars being compiled, by digest.
    pending: dict[bytes, PendingGrammarSnapshot]


class FairShareSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `FairShare`.

    Accounts are given by their indexes in `EngineSnapshot.usages`.
    """

    level: float
    last: int | None
    last_at: float
    other_at: float
    known: list[int]


class SchedulerSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `Scheduler` and its slots.

    Requests are given by their indexes in `EngineSnapshot.requests`.
    """

    running: list[int]
    unbound: list[int]
    #: Account by account, each account's requests by rank.
    waiting: list[int]
    blocked_newcomer: int | None
    has_paused_decodes: bool
    num_prefill_tokens: int
    free_slots: list[int]
    slot_generations: list[int]
    slot_releases: list[SlotRelease]


class CheckpointSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `CheckpointPool`. The requests store the checkpoints that they hold."""

    #: Free checkpoints; the last one is allocated first.
    free: list[int]
    #: Hash -> checkpoint, the one used longest ago first.
    cached: dict[bytes, int]
    num_evicted: dict[str, int]


class BlockSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `BlockPool` and its `PrefixCache`."""

    holders: list[int]
    #: Free blocks that no window has passed, in the order in which they will be allocated.
    free: list[int]
    #: Free blocks that a window has passed, likewise.
    passed: list[int]
    proven: set[int]
    #: Block -> hash of its content.
    cached: dict[int, bytes]
    draft_computed: set[int]
    #: None: the model has no recurrent state.
    checkpoints: CheckpointSnapshot | None


class FetchSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of a `Fetch` that the worker has not reported on."""

    job: int
    request: int
    match: Match
    started_at: float
    state: FetchState


class KVSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `Fetches` and the `TierIndex`.

    There are no leases, because an engine of a cluster has no journal.
    """

    fetches: list[FetchSnapshot]
    last_job: int
    num_failed: dict[str, int]
    num_tokens: int
    num_bytes: int
    tiers: dict[str, Tier]
    load_s: float


class SpeculationSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of the `Speculation`."""

    overhead: dict[int, StepTimes]
    model_tally: AcceptanceTally
    num_started: int


class AdapterSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of an `EngineAdapter`. Its fields have the same meaning."""

    name: str
    path: str
    row: int
    generation: int
    state: AdapterState
    digest: str
    rank: int
    num_requests: int
    client: bytes
    request: int


class EngineSnapshot(SnapshotPart, frozen=True, kw_only=True):
    """The state of an `Engine`. The parts refer to requests by their indexes in `requests`."""

    #: The engine's clock.
    now: float
    #: Number of the last plan.
    step: int
    #: Statistics: tokens of each kind, and preemptions.
    counts: dict[str, int]
    #: Finish reason -> number of requests.
    finished: dict[str, int]
    #: "queued" or "running" -> number of missed deadlines.
    timeouts: dict[str, int]
    #: Known tokens of the requests admitted since the last commit.
    num_admitted_tokens: int
    #: Open requests in order of arrival, then ended requests that still own slot and blocks.
    requests: list[RequestSnapshot]
    #: How many of `requests` are open.
    num_open: int
    #: The accounts that other parts refer to.
    usages: list[AccountUsage]
    #: Indexes of the ended requests that are in a step in flight.
    ended_in_flight: list[int]
    #: Steps in flight, oldest first.
    inflight: list[StepSnapshot]
    #: Account -> its token buckets.
    buckets: dict[str, AccountBuckets]
    #: Measured rates.
    throughput: Throughput
    #: Counters, and the grammars that are compiled or being compiled.
    admission: AdmissionSnapshot
    #: The order between accounts.
    fair_share: FairShareSnapshot
    #: Running and waiting requests, and slots.
    scheduler: SchedulerSnapshot
    #: Requests that encode.
    encoding: EncodingSnapshot
    #: Holders of the blocks, and the prefix cache.
    blocks: BlockSnapshot
    #: Fetches, and the contents of the tiers.
    kv: KVSnapshot
    #: Measured overhead and acceptance of drafts.
    speculation: SpeculationSnapshot
    #: The images of the requests, and the rows that the worker has.
    images: ImagesSnapshot
    #: The LoRA adapters that own a row of the worker's table.
    adapters: list[AdapterSnapshot]
    #: Generation of each row of that table.
    adapter_generations: list[int]


CONVERTED = {"tokens", "account_usage", "adapter", "has_matcher", "drafting", "stage_timer"}
"""Fields of `RequestSnapshot` whose values are converted. The others are copied."""
COPIED = [name for name in RequestSnapshot.__struct_fields__ if name not in CONVERTED]
ADAPTER_FIELDS = AdapterSnapshot.__struct_fields__
"""Fields of `AdapterSnapshot`. All of them are copied."""
