"""Messages between the engine and its worker: one step planned, one step computed.

The engine makes every decision: slots, blocks, numbers of tokens. A plan is complete: each
request's `SlotInit` rewrites all state that a worker keeps for it. So the results of plans that are
executed in order do not depend on earlier contents of slots and blocks.

Legend: R rows (requests) of the step, decode rows (one token) first; S sampled rows; D drafts; N,
M, K: counts. A sampled place is a position where a token is sampled: one for each sampled row, and
one more for each of its drafts, in row order.
"""

from __future__ import annotations

import msgspec

from protocol.arrays import Float32, Int32, UInt8
from protocol.exit_codes import ExitCode
from protocol.kv import (
    KVCancel,
    KVEndpoint,
    KVExport,
    KVFetch,
    KVReport,
    KVStore,
    KVUsed,
    KVWithdraw,
)
from protocol.messages import Message
from protocol.model_card import ModelCard
from protocol.sampling import SamplingParams

NULL_BLOCK = 0
"""The block that is never allocated and always zero. It fills block tables beyond a request's
blocks.
"""


class SlotInit(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a slot must hold for a request: fresh, resumed or prefilled."""

    slot: int
    #: The slot's generation, counted by the engine; it grows with each binding.
    generation: int
    #: [known tokens]: the prompt and the tokens generated so far.
    tokens: Int32
    #: How many of `tokens` are the prompt. Penalties count only the tokens after it.
    prompt_tokens: int
    #: Number of leading positions whose K/V is in `blocks` already (prefix cache).
    num_computed: int
    #: Block ids of positions [0, ...), in order.
    blocks: Int32
    #: The user's seed or the engine's draw; the same each time the request is bound.
    seed: int
    #: All tokens that would end the answer; masked until `min_tokens` tokens are generated.
    stop_ids: list[int]
    params: SamplingParams


class SlotRelease(msgspec.Struct, frozen=True, kw_only=True):
    """A slot whose request ended or was preempted.

    `generation` is that of the binding which ends. The worker refuses a release of any other.
    """

    slot: int
    generation: int


class StepPlan(Message, frozen=True, kw_only=True):
    """Engine -> worker. Compute one step, in this order: release, bind, extend, zero, compute,
    sample.

    A row with drafts samples after its last known token and after each draft. Each place draws what
    plain decoding would have drawn there. The answer takes the sampled tokens up to and including
    the first one that differs from its draft; what was computed after that one is void.
    """

    step: int
    release: list[SlotRelease]
    #: Slots newly occupied. One plan may release a slot and bind it again.
    bind: list[SlotInit]
    #: [M], with `block_indexes` and `block_ids`: set table[slot, index] = id, for slots bound
    #: earlier.
    block_slots: Int32
    block_indexes: Int32
    block_ids: Int32
    #: [M] blocks to fill with zeros before any writes.
    zero_blocks: Int32
    #: [R] slot of each row.
    row_slots: Int32
    #: [R] first position computed = number of tokens that already have K/V.
    row_starts: Int32
    #: [R] number of positions computed, >= 1.
    row_tokens: Int32
    #: [R] 1: sample a token after the row's last position.
    row_samples: UInt8
    #: Number of rows with row_tokens == 1, which come first.
    num_decodes: int
    #: [N] indexes into the sampled places, ascending, where a grammar constrains the token; a
    #: `Masks` message follows. None: no place is constrained and no `Masks` follow.
    masked: Int32 | None = None
    #: [R] how many of the row's last positions hold drafts; a row with drafts samples. None: no row
    #: has drafts.
    row_drafts: Int32 | None = None
    #: [D] the drafts, in row order.
    drafts: Int32 | None = None
    #: [R] first position that the draft model computes in the row; -1: none in this step. None: the
    #: draft model computes nothing.
    follow_starts: Int32 | None = None
    #: [R] number of positions that the draft model computes from there. 0 in rows where drafts are
    #: `wanted`: all positions known after the step has sampled. None if `follow_starts` is.
    follow_tokens: Int32 | None = None
    #: [R] number of tokens that the draft model then drafts, in rows that sample; their blocks are
    #: allocated. None if `follow_starts` is.
    wanted: Int32 | None = None


class Masks(Message, frozen=True, kw_only=True):
    """Engine -> worker, sent after a plan with `masked` places, while the step is being computed:
    the tokens that the grammar allows. After a draft, they hold if that draft is right.

    bits   [N, ceil(vocab_size / 32)] for each masked place; bit t % 32 of word t // 32 is token t
    """

    step: int
    bits: Int32


class Logprobs(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Logprobs of some tokens: natural logarithms of the distribution that their request chose
    (`SamplingParams.logprobs_of`). Those of prompt tokens are always the model's. K = max(counts).
    """

    #: [N] index into the result's tokens (or the step's rows, for prompt logprobs), ascending.
    rows: Int32
    #: [N] how many of the K columns each has. Impossible tokens are left out.
    counts: Int32
    #: [N] token id.
    ids: Int32
    #: [N] logprob of `ids`.
    logprobs: Float32
    #: [N] rank of `ids`; 1 is the most likely token.
    ranks: Int32
    #: [N, K] the most likely tokens, best first.
    top_ids: Int32
    #: [N, K] their logprobs.
    top_logprobs: Float32
    #: [N] number of `asked` columns of each; None: no request named tokens.
    asked_counts: Int32 | None = None
    #: [N, A] logprobs of the tokens that the request named.
    asked: Float32 | None = None
    #: [D] indexes into N of the entries whose request wants both distributions; None: there are
    #: none.
    drawn_at: Int32 | None = None
    #: [D, 1 + K + A] under the distribution that the token was drawn from: the logprobs of the
    #: token itself, of the most likely tokens, and of the named tokens.
    drawn: Float32 | None = None


class StepResult(Message, frozen=True, kw_only=True):
    """Worker -> engine. The results of one step."""

    step: int
    #: [T] sampled tokens, in the order of the rows with row_samples = 1. One per row; a row with
    #: drafts has as many as became part of the answer.
    tokens: Int32
    #: [N] indexes into the sampled rows whose logits were not finite, or where no token was
    #: possible. Their last token is 0 and must be ignored.
    failed: Int32
    #: [S] number of tokens of each sampled row, >= 1. None if the plan has no drafts: all are 1.
    counts: Int32 | None = None
    #: Of sampled tokens, for rows that requested them.
    logprobs: Logprobs | None = None
    #: Of prompt tokens at positions row_starts + 1 ..., by row, then by position. `rows` then
    #: indexes the step's rows.
    prompt_logprobs: Logprobs | None = None
    #: The drafts that were `wanted` of each row, in row order; void if the row failed. None if none
    #: were wanted.
    proposed: Int32 | None = None
    #: Seconds of computation, for the statistics.
    compute_s: float = 0.0


class WorkerReady(Message, frozen=True, kw_only=True):
    """Worker -> engine, once: the model is loaded and memory is reserved."""

    model: ModelCard
    max_len: int
    max_slots: int
    block_tokens: int
    #: Includes the null block.
    num_blocks: int
    rank: int = 0
    #: Seconds of each start-up phase, in order, for display.
    phases: list[tuple[str, float]] = []
    #: Time of the draft model per token, as a fraction of the main model's. None: no draft model.
    draft_cost: float | None = None
    #: (rows, seconds), by growing rows: time that the linears of a step with that many rows take
    #: here. Empty: not measured.
    step_costs: list[tuple[int, float]] = []
    #: How this worker transfers K/V (kv.py); None: it does not.
    kv: KVEndpoint | None = None
    #: Names of its tiers, nearest first. A KVReport with their contents follows.
    kv_tiers: list[str] = []


class WorkerFailed(Message, frozen=True, kw_only=True):
    """Worker -> engine, its last message: the cause of the failure, in one line.

    exit_code   exit code for the engine, and so for the server, which ends with it (ExitCode)
    """

    message: str
    rank: int = 0
    exit_code: int = ExitCode.WORKER_LOST


class Trace(Message, frozen=True, kw_only=True):
    """Engine -> worker. Record the next `steps` steps and write a trace to `directory`; 0 steps:
    stop recording now. Never sent between a plan and its masks. Each Trace with steps is answered
    by one Traced.
    """

    steps: int
    directory: str = ""


class Traced(Message, frozen=True, kw_only=True):
    """Worker -> engine. The trace was written, or `error` says why not. Times: since 1970."""

    file: str = ""
    steps: int = 0
    began: float = 0.0
    ended: float = 0.0
    error: str = ""


class Stop(Message, frozen=True, kw_only=True):
    """Engine -> worker. Exit with code 0."""


ToWorker = (
    StepPlan | Masks | KVExport | KVWithdraw | KVFetch | KVCancel | KVStore | KVUsed | Trace | Stop
)
FromWorker = WorkerReady | StepResult | KVReport | Traced | WorkerFailed
