"""Engine <-> worker: one step asked for, one step done.

The engine owns every decision: which slot, which blocks, how many tokens. A plan is complete: a
worker that executes plans in order computes the same whatever happened before in the slots and
blocks, because everything of a request that a worker keeps is (re)written by its `SlotInit`.

Legend: R rows (requests) of the step, decode rows (one token) first; S sampled rows; D drafts; N,
M, K: counts. Sampled places are those where a token is sampled: one of each sampled row, and one
more for each of its drafts, in row order.
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
"""Never allocated, always zero: what a block table shows beyond its request's blocks."""


class SlotInit(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a slot must hold for a request, whether fresh, resumed after preemption or
    prefilled.

    generation     of the slot; grows with each binding
    tokens         [known tokens]: the prompt and whatever was generated already
    prompt_tokens  how many of them are prompt (penalties count only what follows)
    num_computed   K/V of the first so many positions is in `blocks` already (prefix cache)
    blocks         block ids of positions [0, ...), in order
    seed           the engine's draw or the user's: equal in every life of the request
    stop_ids       all tokens that would end the answer: masked while fewer than min_tokens are
                   there
    """

    slot: int
    generation: int
    tokens: Int32
    prompt_tokens: int
    num_computed: int
    blocks: Int32
    seed: int
    stop_ids: list[int]
    params: SamplingParams


class StepPlan(Message, frozen=True, kw_only=True):
    """Engine -> worker. Do exactly this, in this order: release, bind, extend, zero, compute,
    sample.

    release        [N]  slots whose request ended or was preempted
    bind                slots newly occupied (a slot may be released and bound in one plan)
    block_slots, block_indexes, block_ids   [M]  append: table[slot, index] = id, for slots bound
                                                 earlier
    zero_blocks    [M]  blocks to fill with zeros before anything is written
    row_slots      [R]  which slot each row is
    row_starts     [R]  first position computed = tokens whose K/V exists already
    row_tokens     [R]  how many positions are computed, >= 1
    row_samples    [R]  1: sample a token after the row's last position
    row_drafts     [R]  how many of the row's positions, its last ones, hold a guess at what will be
                        sampled; such a row samples. None where no row has any
    drafts         [D]  the guesses, in row order
    num_decodes         rows with row_tokens == 1, which come first
    masked         [N]  indexes into the sampled places, ascending, where a grammar constrains the
                        token: `Masks` follow; None where there are none, and nothing follows

    follow_starts  [R]  where the draft model begins to compute the row, too; -1: not in this step.
                        None where it has nothing to do
    follow_tokens  [R]  how many positions it computes from there on; 0 where guesses are wanted:
                        all that are known when the step has sampled. None as `follow_starts`
    wanted         [R]  how many tokens it then guesses behind these, in rows that sample; their
                        blocks are there. None as `follow_starts`

    A row with drafts samples after its last known token and after each draft, at every place what
    it would have sampled there without drafts. The tokens up to and with the first that is not the
    draft are the answer's; what was computed behind that one is void.
    """

    step: int
    release: Int32
    bind: list[SlotInit]
    block_slots: Int32
    block_indexes: Int32
    block_ids: Int32
    zero_blocks: Int32
    row_slots: Int32
    row_starts: Int32
    row_tokens: Int32
    row_samples: UInt8
    num_decodes: int
    masked: Int32 | None = None
    row_drafts: Int32 | None = None
    drafts: Int32 | None = None
    follow_starts: Int32 | None = None
    follow_tokens: Int32 | None = None
    wanted: Int32 | None = None


class Masks(Message, frozen=True, kw_only=True):
    """Engine -> worker, after a plan with `masked` places, while it is being computed: which tokens
    are possible; behind a draft, if the draft is right.

    bits   [N, ceil(vocab_size / 32)] for each masked place; bit t % 32 of word t // 32: token t
    """

    step: int
    bits: Int32


class Logprobs(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Logprobs of some tokens, in natural logarithms of the distribution that their request named
    (`SamplingParams.logprobs_of`); those of a prompt's tokens are always the model's.

    rows     [N]     index into the result's tokens (or the step's rows, for prompt logprobs),
                     ascending
    counts   [N]     how many of the K columns each asked for, and has: impossible tokens are none
    ids      [N]     the token in question;  logprobs [N], ranks [N] (1 = most likely)
    top_ids, top_logprobs  [N, K]   the K most likely tokens, best first; K = max(counts)
    asked_counts [N], asked [N, A]  logprobs of the tokens that the request named; None: nobody did
    drawn_at [D], drawn [D, 1 + K + A]  for those who asked for both distributions, as indexes into
                     N: the same tokens under the one they were drawn from: the one in question,
                     the most likely ones, the named ones; None: nobody did
    """

    rows: Int32
    counts: Int32
    ids: Int32
    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32
    asked_counts: Int32 | None = None
    asked: Float32 | None = None
    drawn_at: Int32 | None = None
    drawn: Float32 | None = None


class StepResult(Message, frozen=True, kw_only=True):
    """Worker -> engine. What the step computed.

    tokens           [T]  sampled tokens, in row order of the rows with row_samples = 1: one each,
                          but of rows with drafts, as many as are the answer's
    counts           [S]  how many each has, at least 1; None where the plan has no drafts: all 1
    logprobs         of sampled tokens, for rows that asked
    prompt_logprobs  of prompt tokens at positions row_starts+1 ... (as far as they are prompt), in
                     row then position order; `rows` then indexes the step's rows
    failed           [N]  indexes into the sampled rows whose logits were not finite, or where no
                          token was possible; their last token is 0, and is none
    proposed         as many tokens of each row as were `wanted` of it, in row order; void where the
                     row failed. None where nothing was
    compute_s        seconds of computation, for the statistics
    """

    step: int
    tokens: Int32
    failed: Int32
    counts: Int32 | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    proposed: Int32 | None = None
    compute_s: float = 0.0


class WorkerReady(Message, frozen=True, kw_only=True):
    """Worker -> engine, once: the model is loaded, memory is reserved.

    num_blocks   including the null block
    phases       seconds per start-up phase, in order, to be shown
    draft_cost   time that the draft model takes for a token, as a part of what the model takes;
                 None: there is no draft model
    step_costs   (rows, seconds), by growing rows: what the linears of a step of so many tokens take
                 here; empty: nobody knows
    kv           how it hands over K/V (kv.py); None: it does not
    kv_tiers     which tiers it has, the nearest first; a KVReport with what they hold follows
    """

    model: ModelCard
    max_len: int
    max_slots: int
    block_tokens: int
    num_blocks: int
    rank: int = 0
    phases: list[tuple[str, float]] = []
    draft_cost: float | None = None
    step_costs: list[tuple[int, float]] = []
    kv: KVEndpoint | None = None
    kv_tiers: list[str] = []


class WorkerFailed(Message, frozen=True, kw_only=True):
    """Worker -> engine, its last word: what went wrong (`message` names the cause in one line).

    exit_code   that of the engine, and so of the server, which ends with it (ExitCode)
    """

    message: str
    rank: int = 0
    exit_code: int = ExitCode.WORKER_LOST


class Trace(Message, frozen=True, kw_only=True):
    """Engine -> worker, never between a plan and its masks: record the next `steps` steps and write
    what they did to `directory`; 0 steps: end that now. Each with steps is answered by one Traced.
    """

    steps: int
    directory: str = ""


class Traced(Message, frozen=True, kw_only=True):
    """Worker -> engine. Written, or not: then `error` says why. Times are seconds since 1970."""

    file: str = ""
    steps: int = 0
    began: float = 0.0
    ended: float = 0.0
    error: str = ""


class Stop(Message, frozen=True, kw_only=True):
    """Engine -> worker: exit with code 0."""


ToWorker = (
    StepPlan | Masks | KVExport | KVWithdraw | KVFetch | KVCancel | KVStore | KVUsed | Trace | Stop
)
FromWorker = WorkerReady | StepResult | KVReport | Traced | WorkerFailed
