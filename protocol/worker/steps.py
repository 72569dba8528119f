"""Messages between the engine and its worker: `StepPlan` starts a step, `StepResult` answers it.

The workers of a tensor parallel group (ranks) get the same messages in the same order. All of them
report that they are ready or have failed, and rank 0 alone answers the others.

The engine makes every decision: which slots, which blocks, how many tokens. The `SlotInit` of a
request sets all state that the worker stores for the request. So the results of plans that are
executed in order do not depend on what the slots and blocks contained before.

Legend: R rows (requests) of the step, decode rows (one token) first; S rows that sample; D drafts;
B, N, M, K, A: counts. A sampled place is a position where a token is sampled. Each row that samples
has one, plus one for each of its drafts. They are in row order.
"""

from __future__ import annotations

import msgspec

from protocol.engine.adapters import AdapterInfo
from protocol.engine.attachments import AttachedTensor, Attachment, Digest
from protocol.engine.encoding import EncodeInputs
from protocol.engine.kv_window import KVGroups
from protocol.engine.messages import Message
from protocol.engine.model_card import ModelCard
from protocol.engine.sampling import SamplingParams
from protocol.process.exit_codes import ExitCode
from protocol.wire.arrays import Float32, Int32, UInt8
from protocol.wire.errors import ErrorInfo
from protocol.worker.kv import (
    KVCancel,
    KVEndpoint,
    KVExport,
    KVFetch,
    KVReport,
    KVStore,
    KVUsed,
    KVWithdraw,
)

NULL_BLOCK = 0
"""Id of the block that is never allocated and always zero. It fills the unused entries of block
tables, and those of blocks that a window has passed.
"""


MAX_HEAD_LAG = 16
"""The most positions before a row for which the model's own head can compute entries in a step: the
worker keeps the hidden states of a request's last positions.
"""

NO_CHECKPOINT = 0
"""`SlotInit.checkpoint` of a request whose recurrent state starts with zeros. Checkpoints have ids
from 1 on."""

NO_ADAPTER = -1
"""`SlotInit.adapter` of a request that uses the model without an adapter."""


class SlotInit(msgspec.Struct, frozen=True, kw_only=True):
    """The complete content of a slot, for a new, resumed or prefilled request."""

    slot: int
    #: The slot's generation: the engine increases it each time it binds the slot.
    generation: int
    #: [number of known tokens]: the prompt and the tokens generated so far.
    tokens: Int32
    #: Number of prompt tokens, which are the first of `tokens`. Penalties count only the others.
    prompt_tokens: int
    #: Number of leading positions whose K/V is in `blocks` already (prefix cache).
    num_computed: int
    #: Ids of the request's blocks, in the order of their positions; the null block for blocks that
    #: a window has passed. With K/V groups, the entries of all columns (`KVGroups`); the null block
    #: also for blocks of a window that are allocated later.
    blocks: Int32
    #: The seed that the user gave or the engine drew; the same each time the request is bound.
    seed: int
    #: All tokens that end the answer. They are masked until `min_tokens` tokens are generated.
    stop_ids: list[int]
    params: SamplingParams
    #: Row of the request's adapter in the worker's table; NO_ADAPTER: none.
    adapter: int = NO_ADAPTER
    #: Generation of that row. The worker refuses another one than that of the loaded adapter.
    adapter_generation: int = 0
    #: Id of the checkpoint with the recurrent state after the first `num_computed` positions.
    #: NO_CHECKPOINT: `num_computed` is 0, or the model has no recurrent state.
    checkpoint: int = NO_CHECKPOINT
    #: The images in the prompt. The worker puts their rows in place of the embeddings of their
    #: positions. It has the rows of all images that a plan computes positions of.
    images: list[Attachment] = []
    #: Largest surprise, in bits, of the next token; 0 if the request does not use Mirostat.
    mirostat_mu: float = 0.0


class SlotRelease(msgspec.Struct, frozen=True, kw_only=True):
    """A slot whose request ended or was preempted. The worker refuses a `generation` other than the
    one with which the slot was bound.
    """

    slot: int
    generation: int


class StepPlan(Message, frozen=True, kw_only=True):
    """Engine -> worker. Compute one step, in this order: release slots, bind slots (and read their
    checkpoints), extend block tables, zero blocks, compute, sample, save checkpoints.

    A row with drafts samples after its last known token and after each draft. Each sampled token is
    the one that decoding without drafts would have drawn there. The tokens up to and including the
    first one that differs from its draft become part of the answer. Later ones are discarded.
    """

    step: int
    release: list[SlotRelease]
    #: Slots that get a request. One plan may release a slot and bind it again.
    bind: list[SlotInit]
    #: [M] slots that an earlier plan has bound. Entry `block_indexes[m]` of the block table of slot
    #: `block_slots[m]` becomes `block_ids[m]`: a new block, or the null block in place of a block
    #: that a window has passed.
    block_slots: Int32
    block_indexes: Int32
    block_ids: Int32
    #: [M] blocks to fill with zeros before the step computes.
    zero_blocks: Int32
    #: [R] slot of each row.
    row_slots: Int32
    #: [R] first position to compute. After the earlier plans, all positions before it have K/V.
    row_starts: Int32
    #: [R] number of positions to compute, >= 1.
    row_tokens: Int32
    #: [R] whether to sample a token after the row's last position: 1 or 0.
    row_samples: UInt8
    #: Number of rows with row_tokens == 1, which come first.
    num_decodes: int
    #: [N] ascending indexes of the sampled places where a grammar may constrain the token. A
    #: `Masks` message follows. None: there are no such places, and no `Masks` follows.
    masked: Int32 | None = None
    #: [R] number of drafts, at the last positions of the row. A row with drafts samples. None: no
    #: row has drafts.
    row_drafts: Int32 | None = None
    #: [D] the drafts, in row order.
    drafts: Int32 | None = None
    #: [R] first position that the draft model computes in the row; -1: none in this step. None: the
    #: draft model computes nothing. The model's own head computes all positions from there that are
    #: followed by a known token. It starts at most MAX_HEAD_LAG positions before the row, and at a
    #: position that the worker has computed in this slot.
    follow_starts: Int32 | None = None
    #: [R] number of positions that the draft model computes from there. It is 0 in rows with
    #: `wanted` drafts: there the draft model computes up to the last token that is known after the
    #: step has sampled. None if `follow_starts` is None.
    follow_tokens: Int32 | None = None
    #: [R] number of tokens that the draft model then drafts, in rows that sample. Their blocks are
    #: allocated already. None if `follow_starts` is None.
    wanted: Int32 | None = None
    #: [C] slots of rows of this step whose recurrent state is copied to a checkpoint on the way. A
    #: slot can be there several times. None: no state is copied.
    save_slots: Int32 | None = None
    #: [C] number of the request's leading positions whose state is copied. The last of them is one
    #: that the row computes. If it follows a wrong draft, the checkpoint stays as it was. None if
    #: `save_slots` is None.
    save_lens: Int32 | None = None
    #: [C] ids of the checkpoints, all different. None if `save_slots` is None.
    save_checkpoints: Int32 | None = None


class EncodePlan(Message, frozen=True, kw_only=True):
    """Engine -> worker. Encode these inputs. The step uses no slots and no K/V blocks. Its results
    do not depend on other steps, and an input's result does not depend on the others (beyond
    rounding)."""

    step: int
    inputs: EncodeInputs


class EncodeImage(Message, frozen=True, kw_only=True):
    """Engine -> worker. Encode an image beside the steps, and keep its rows until DropImages names
    it. The worker answers with ImageEncoded, in the order of these messages. A plan may compute
    positions of the image after that."""

    digest: Digest
    tensors: list[AttachedTensor]
    #: Number of rows that the requests expect. Another number is an error.
    num_rows: int


class DropImages(Message, frozen=True, kw_only=True):
    """Engine -> worker. Free the rows of these images. No later plan uses them."""

    digests: list[Digest]


class Masks(Message, frozen=True, kw_only=True):
    """Engine -> worker. The tokens that the grammars allow at the `masked` places of a plan. Sent
    after the plan, while the worker computes the step.

    The mask of a place after a draft assumes that the draft is right.

    bits   [N, ceil(vocab_size / 32)]; token t is allowed if bit t % 32 of word t // 32 of the row
           is 1
    """

    step: int
    bits: Int32


class Logprobs(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Logprobs (natural logarithms of probabilities) of N entries; an entry is one token position.

    Logprobs of sampled tokens are computed from the distribution that their request chose
    (`SamplingParams.logprobs_of`), those of prompt tokens from the model's. K = max(counts).
    """

    #: [N] ascending indexes into the result's `tokens`; for prompt logprobs, into the step's rows.
    rows: Int32
    #: [N] number of the K columns that an entry uses. Impossible tokens are left out.
    counts: Int32
    #: [N] id of the sampled token or the prompt token.
    ids: Int32
    #: [N] logprobs of `ids`.
    logprobs: Float32
    #: [N] ranks of `ids`; 1 is the most likely token.
    ranks: Int32
    #: [N, K] the most likely tokens, best first.
    top_ids: Int32
    #: [N, K] logprobs of `top_ids`.
    top_logprobs: Float32
    #: [N] number of the A columns that an entry uses. None: no request has `logprob_token_ids`.
    asked_counts: Int32 | None = None
    #: [N, A] logprobs of the request's `logprob_token_ids`.
    asked: Float32 | None = None
    #: [B] indexes of the B entries whose request chose both distributions. None: there are none.
    drawn_at: Int32 | None = None
    #: [B, 1 + K + A] logprobs in the distribution that the token was drawn from: of the token
    #: itself, of `top_ids`, and of the request's `logprob_token_ids`.
    drawn: Float32 | None = None


class StepResult(Message, frozen=True, kw_only=True):
    """Worker -> engine, answering a StepPlan. The results of one step."""

    step: int
    #: Sampled tokens, in the order of the rows that sample. A row without drafts has one token, a
    #: row with drafts those that became part of the answer.
    tokens: Int32
    #: [N] indexes, among the rows that sample, of rows whose logits were not finite or for which no
    #: token was possible. The last token of a failed row is 0 and must be ignored.
    failed: Int32
    #: [S] number of tokens of each row that samples, >= 1. None: the plan has no drafts, so each
    #: row has 1.
    counts: Int32 | None = None
    #: Logprobs of sampled tokens, for rows whose request has them.
    logprobs: Logprobs | None = None
    #: Logprobs of the prompt tokens at positions row_starts + 1 ..., ordered by row, then by
    #: position.
    prompt_logprobs: Logprobs | None = None
    #: [S] largest surprise of each row's next token (`SlotInit.mirostat_mu`); 0 in rows without
    #: Mirostat. None: no row uses it.
    mirostat_mu: Float32 | None = None
    #: The drafts that the plan `wanted` for each row, in row order. Those of failed rows must be
    #: ignored. None: none were wanted.
    proposed: Int32 | None = None
    #: Seconds of computation, for the statistics.
    compute_s: float = 0.0


class EncodeResult(Message, frozen=True, kw_only=True):
    """Worker -> engine, answering an EncodePlan. Results come in the order of all plans."""

    step: int
    #: [N, size of a result] the result of each input. It is not finite if the computation failed.
    vectors: Float32
    #: [F] ascending indexes of the inputs whose result is not finite.
    failed: Int32
    #: Seconds of computation, for the statistics.
    compute_s: float = 0.0


class ImageEncoded(Message, frozen=True, kw_only=True):
    """Worker -> engine, answering EncodeImage.

    encode_s  seconds of computation
    error     why the image could not be encoded; "": it was. The worker keeps no rows of it
    """

    digest: Digest
    encode_s: float = 0.0
    error: str = ""


class TokenizerRead(Message, frozen=True, kw_only=True):
    """Worker -> engine, once, before the weights are loaded. The fields are those of `ModelCard`.

    The engine builds its grammar compiler while the weights load. That takes up to two seconds,
    during which the engine's loop stands still.
    """

    tokenizer: bytes
    vocab_size: int
    eos_token_ids: list[int]


class WorkerJoins(Message, frozen=True, kw_only=True):
    """Worker -> engine, the first message of a worker that another machine has started. It asks for
    a place in the group. The engine answers with WorkerSettings or JoinRefused."""

    #: The rank that the worker requests; -1: any that is free.
    rank: int = -1


class WorkerSettings(Message, frozen=True, kw_only=True):
    """Engine -> worker, answering WorkerJoins.

    config   a WorkerConfig as JSON. Files are named without their directories, because the worker's
             machine has them in other places
    """

    config: bytes


class JoinRefused(Message, frozen=True, kw_only=True):
    """Engine -> worker, answering WorkerJoins. There is no place for the worker in the group."""

    error: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """Engine -> worker on another machine. It has no effect. It cannot be sent to a worker that has
    disconnected, and so the engine notices that."""


class WorkerReady(Message, frozen=True, kw_only=True):
    """Worker -> engine, once. The model is loaded and the memory is reserved."""

    model: ModelCard
    max_len: int
    max_slots: int
    #: Most tokens of a step. The default depends on the device, so the worker chooses it.
    token_budget: int
    block_tokens: int
    #: Number of blocks in the KV cache, including the null block.
    num_blocks: int
    rank: int = 0
    #: Seconds of each start-up phase, in order, for display.
    phases: list[tuple[str, float]] = []
    #: Time of the draft model or head per token, as a fraction of the main model's. None: there is
    #: neither.
    draft_cost: float | None = None
    #: (tokens, seconds) in ascending order: the time that the linear layers of a step with that
    #: many tokens take on this machine. Empty: not measured.
    step_costs: list[tuple[int, float]] = []
    #: How this worker transfers K/V (kv.py). None: it does not.
    kv: KVEndpoint | None = None
    #: Names of the worker's tiers, fastest first.
    kv_tiers: list[str] = []
    #: What the tiers already store, so that the first request finds it. None: nothing.
    kv_report: KVReport | None = None
    #: Every layer of the model has a window of at most this many tokens, so the engine may free the
    #: blocks before it (kv_window.py). None: the engine must keep all blocks of a request.
    kv_window: int | None = None
    #: Some layers of the model have a window, so the engine may free the blocks of these layers.
    #: Block tables then have several blocks per column. None: a block stores all layers.
    kv_groups: KVGroups | None = None
    #: Rows of the table of LoRA adapters.
    max_adapters: int = 0
    #: The adapters that were loaded at the start: in the first rows, with generation 1.
    adapters: list[AdapterInfo] = []
    #: The model's class keeps a request's K/V and state in an object of its own. So prefixes cannot
    #: be shared, and no token can be taken back: there are no drafts. The engine counts blocks all
    #: the same, which bounds the memory of these objects.
    has_own_cache: bool = False
    #: Bytes of the recurrent state of one request; 0: the model has none.
    state_bytes: int = 0
    #: Number of checkpoints, each of which can hold one such state. 0: there is no memory for them,
    #: so that prefixes cannot be shared.
    num_checkpoints: int = 0
    #: Number of rows of images that there is memory for; 0: the worker encodes no images.
    image_rows: int = 0


class RankDigest(Message, frozen=True, kw_only=True):
    """Worker -> engine, now and then, from each rank of a group except 0. The digest of all tokens
    that the rank has sampled, up to this step (ranks.py)."""

    step: int
    digest: int


class WorkerFailed(Message, frozen=True, kw_only=True):
    """Worker -> engine, its last message: the cause of the failure, in one line.

    exit_code        the ExitCode with which the engine, and so the server, should end
    is_consequence   whether the worker failed only because it has lost another rank of its group
    """

    message: str
    rank: int = 0
    exit_code: int = ExitCode.WORKER_LOST
    is_consequence: bool = False


class AdapterLoad(Message, frozen=True, kw_only=True):
    """Engine -> worker. Load the LoRA adapter at `path` into a free row of the table. The worker
    answers with an AdapterReport. Until then, no plan uses the row."""

    row: int
    generation: int
    path: str


class AdapterUnload(Message, frozen=True, kw_only=True):
    """Engine -> worker. Free a row and the memory of its adapter. No later plan computes a request
    with this row and generation. The worker answers with an AdapterReport."""

    row: int
    generation: int


class AdapterReport(Message, frozen=True, kw_only=True):
    """Worker -> engine, answering AdapterLoad or AdapterUnload. The row holds the adapter, or is
    free.

    digest   of the content of the adapter that was loaded; "": none was
    rank     its largest rank
    error    why the adapter could not be loaded; None: it was, or the row was freed
    """

    row: int
    generation: int
    digest: str = ""
    rank: int = 0
    error: ErrorInfo | None = None


class Trace(Message, frozen=True, kw_only=True):
    """Engine -> worker. Record the next `steps` steps and write a trace to `directory`. If `steps`
    is 0, stop recording now.

    The worker answers each Trace with one Traced, except those with 0 steps. A Trace is never sent
    between a plan and its masks.
    """

    steps: int
    directory: str = ""


class Traced(Message, frozen=True, kw_only=True):
    """Worker -> engine, answering Trace. The trace was written, or `error` gives the reason.
    `began` and `ended`, the times of the recording, are in seconds since 1970."""

    file: str = ""
    steps: int = 0
    began: float = 0.0
    ended: float = 0.0
    error: str = ""


class Stop(Message, frozen=True, kw_only=True):
    """Engine -> worker. Exit with code 0."""


ToWorker = (
    StepPlan
    | EncodePlan
    | EncodeImage
    | DropImages
    | Masks
    | KVExport
    | KVWithdraw
    | KVFetch
    | KVCancel
    | KVStore
    | KVUsed
    | AdapterLoad
    | AdapterUnload
    | Trace
    | Stop
    | WorkerSettings
    | JoinRefused
    | Heartbeat
)
FromWorker = (
    WorkerJoins
    | TokenizerRead
    | WorkerReady
    | StepResult
    | EncodeResult
    | ImageEncoded
    | RankDigest
    | KVReport
    | AdapterReport
    | Traced
    | WorkerFailed
)
