"""An engine with a fake worker, for tests of the engine's decisions without processes and tensors.

`EchoWorker` executes plans as the real worker must: it stores the tokens of every slot and the
content of every block. It samples a token that is a pure function of all tokens so far. So a wrong
block, a stale slot or a lost token leads to a wrong answer, not only to a wrong count. The K/V of
drafts is written as in the real worker, whether the drafts are right or not. If the model has a
recurrent state, the state of a slot is the tuple of all tokens that it has seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate, chain, islice
from typing import Any

import msgspec

from engine_core.engine import Engine
from engine_core.grammar.compiler import Compiler
from engine_core.grammar.jobs import CompiledGrammar, CompileJob
from engine_core.grammar.matcher import MatcherTemplate
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.attachments import Attachment
from protocol.engine.encoding import EncodeInputs, EncodingCard
from protocol.engine.grammar import Body, Grammar
from protocol.engine.kv_window import KVGroups, max_request_tokens
from protocol.engine.messages import (
    Accepted,
    Account,
    Encode,
    Generate,
    Limits,
    LoadAdapter,
    Output,
    Refused,
    UnloadAdapter,
    Usage,
)
from protocol.engine.model_card import ModelCard
from protocol.engine.sampling import SamplingParams
from protocol.wire.arrays import Float32, Int32
from protocol.wire.errors import ServingError
from protocol.worker.kv import KVCancel, KVFetch, KVReport, KVStore, KVUsed, TierSource
from protocol.worker.steps import (
    MAX_HEAD_LAG,
    NO_CHECKPOINT,
    NULL_BLOCK,
    EncodePlan,
    EncodeResult,
    Masks,
    SlotInit,
    StepPlan,
    StepResult,
)
from tests.support.echo_adapters import ROOT, EchoAdapters, adapter_info
from tests.support.echo_images import EchoImages, echo_images_card, with_rows
from tests.support.grammars import signs_tokenizer
from tests.support.handover import ClusterMember, EchoMover
from tests.support.tiers import EchoTiers

VOCAB = 97
EOS = 0
CLIENT = b"client"
GUESSED = -1
"""An entry of a head that it has made of its own guess, and not of a known token."""
MAX_INPUT, ECHO_SIZE = 40, 3
"""Most tokens of an input, and numbers in its result, of a model that encodes."""
ECHO_ROW_BYTES = 30_000
FAILING_SUM = 13
"""The echo model fails to encode an input whose tokens add up to this."""


def next_token(tokens: list[int], seed: int = 0, possible: list[int] | None = None) -> int:
    """Return the token that the echo model samples after `tokens`. About one in 85 is EOS.

    possible   the tokens that a grammar allows; None: all
    """
    drawn = sha256(repr((tokens, seed)).encode()).digest()[0]
    return drawn % VOCAB if possible is None else possible[drawn % len(possible)]


def repetitive_token(tokens: list[int], seed: int = 0, possible: list[int] | None = None) -> int:
    """Return the token of an echo model that repeats itself, so that drafts are often right. In
    seven of eight cases the token depends only on the last one, modulo 4."""
    drawn = sha256(repr((tokens, seed)).encode()).digest()[1]
    return next_token(tokens if drawn % 8 == 0 else [tokens[-1] % 4], seed, possible)


def echo_vector(tokens: Sequence[int], split: int) -> list[float]:
    """Return the result of the echo model for one input."""
    return [float(len(tokens)), float(sum(tokens)), float(split)]


SampleToken = Callable[[list[int], int, list[int] | None], int]


def answer(
    prompt: list[int],
    max_tokens: int,
    seed: int = 0,
    sample: SampleToken = next_token,
    *,
    ignore_eos: bool = False,
) -> list[int]:
    """Return the expected answer to `prompt`, computed without an engine."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(sample(tokens, seed, None))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


def guess_with_accuracy(chance: float, sample: SampleToken = next_token) -> SampleToken:
    """Return a draft model that proposes the token of `sample` with probability `chance`. It
    ignores grammars."""

    def guess(tokens: list[int], seed: int = 0, possible: list[int] | None = None) -> int:
        right = sample(tokens, seed, None)
        is_right = sha256(repr((tokens, seed)).encode()).digest()[2] < chance * 256
        return right if is_right else (right + 1) % VOCAB

    return guess


def num_head_entries(plan: StepPlan) -> int:
    """Return how many positions the head computes in a step if all of its drafts are right."""
    if plan.follow_starts is None:
        return 0
    columns = (plan.row_starts, plan.row_tokens, plan.follow_starts)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return sum(start + count - begin for start, count, begin in rows if begin >= 0)


@dataclass
class EchoWorker:
    """Executes plans, and asserts that they are consistent.

    sample, guess   the model and the draft model
    kv              block -> offset -> the token whose K/V is there; None: zeroed
    draft_kv        the same for the draft model; for a head, the token that follows the position
    uses_head       whether the model's own head proposes tokens, and there is no draft model
    head_starts     slot -> the first position from which the head has computed all itself
    head_ends       slot -> the position after the last one
    row_ends        slot -> the position after the last one of its last row
    states          slot -> the tokens of which it has the recurrent state
    checkpoints     checkpoint -> the tokens of whose state it is a copy
    """

    limits: Limits
    sample: SampleToken = next_token
    guess: SampleToken = next_token
    uses_head: bool = False
    bound: dict[int, int] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)
    kv: dict[int, list[int | None]] = field(default_factory=dict)
    draft_kv: dict[int, list[int | None]] = field(default_factory=dict)
    head_starts: dict[int, int] = field(default_factory=dict)
    head_ends: dict[int, int] = field(default_factory=dict)
    row_ends: dict[int, int] = field(default_factory=dict)
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)
    checkpoints: dict[int, tuple[int, ...]] = field(default_factory=dict)
    echo_images: EchoImages = field(default_factory=EchoImages)
    _possible: list[list[int] | None] = field(default_factory=list)

    @property
    def _windows(self) -> list[int | None]:
        """Return, for each block of a column, the window of the layers that it stores."""
        groups = self.limits.kv_groups
        if groups is None:
            return [self.limits.kv_window]
        return [None, *[groups.window] * groups.window_blocks]

    def execute(self, plan: StepPlan | EncodePlan, masks: Masks | None = None) -> StepResult:
        assert isinstance(plan, StepPlan)
        self._possible = _possible(plan, masks)
        for released in plan.release:
            slot = released.slot
            assert self.bound.pop(slot) == released.generation, "another's slot was released"
            del self.tokens[slot], self.tables[slot], self.seeds[slot], self.states[slot]
        for init in plan.bind:
            assert init.slot not in self.bound, "a slot was bound twice"
            assert init.generation > self.generations.get(init.slot, 0), "a generation came twice"
            self.bound[init.slot] = self.generations[init.slot] = init.generation
            self.tokens[init.slot] = with_rows(init.tokens.tolist(), init.images)
            self.tables[init.slot] = init.blocks.tolist()
            self.seeds[init.slot] = init.seed
            self.head_starts[init.slot] = self.head_ends[init.slot] = init.num_computed
            self.row_ends[init.slot] = init.num_computed
            self.states[init.slot] = self._first_state(init)
        appended = zip(
            plan.block_slots.tolist(),
            plan.block_indexes.tolist(),
            plan.block_ids.tolist(),
            strict=True,
        )
        for slot, index, block in appended:
            table = self.tables[slot]
            if len(self._windows) > 1:  # blocks of a window may follow later
                table += [NULL_BLOCK] * (index + 1 - len(table))
            assert index <= len(table)
            is_new = index == len(table) or (len(self._windows) > 1 and not table[index])
            assert (block == NULL_BLOCK) != is_new, "an entry was changed"
            table[index : index + 1] = [block]
        for block in plan.zero_blocks.tolist():
            self.kv[block] = [None] * self.limits.block_tokens
            self.draft_kv[block] = [None] * self.limits.block_tokens
        sampled = [
            self._row(*row)
            for row in zip(
                plan.row_slots.tolist(),
                plan.row_starts.tolist(),
                plan.row_tokens.tolist(),
                plan.row_samples.tolist(),
                drafts_of(plan),
                strict=True,
            )
        ]
        results = [tokens for tokens in sampled if tokens]
        self._save_states(plan)
        assert plan.row_tokens.tolist()[: plan.num_decodes] == [1] * plan.num_decodes
        assert sum(plan.row_tokens.tolist()) <= self.limits.token_budget
        return StepResult(
            step=plan.step,
            tokens=Int32.of(token for tokens in results for token in tokens),
            counts=None if plan.row_drafts is None else Int32.of(map(len, results)),
            failed=Int32.of([]),
            proposed=self._run_head(plan) if self.uses_head else self._run_draft_model(plan),
        )

    def encode(self, plan: EncodePlan) -> EncodeResult:
        lengths, tokens = plan.inputs.lengths.tolist(), plan.inputs.tokens.tolist()
        splits = plan.inputs.splits
        ends = list(accumulate(lengths))
        assert len(lengths) == 1 or ends[-1] <= self.limits.token_budget
        rows = [
            echo_vector(tokens[end - length : end], split)
            for end, length, split in zip(
                ends, lengths, lengths if splits is None else splits.tolist(), strict=True
            )
        ]
        failed = [place for place, row in enumerate(rows) if row[1] == FAILING_SUM]
        return EncodeResult(
            step=plan.step,
            vectors=Float32.of(chain.from_iterable(rows), (len(rows), ECHO_SIZE)),
            failed=Int32.of(failed),
        )

    def _run_head(self, plan: StepPlan) -> Int32 | None:
        proposed = self._head_work(plan)
        columns = (plan.row_slots, plan.row_starts, plan.row_tokens)
        for slot, start, count in zip(*(column.tolist() for column in columns), strict=True):
            self.row_ends[slot] = start + count
        return proposed

    def _head_work(self, plan: StepPlan) -> Int32 | None:
        if plan.follow_starts is None or plan.wanted is None:
            return None
        num_entries = num_head_entries(plan)
        assert num_entries <= self.limits.token_budget
        columns = (plan.row_slots, plan.row_starts, plan.row_tokens, plan.row_samples)
        proposed: list[int] = []
        for slot, start, count, samples, begin, wanted in zip(
            *(column.tolist() for column in (*columns, plan.follow_starts, plan.wanted)),
            strict=True,
        ):
            assert not wanted or (samples and begin >= 0)
            if begin < 0:
                continue
            first = max(self.head_starts[slot], start - MAX_HEAD_LAG)
            assert first <= begin <= start, "the head needs hidden states that are not kept"
            lost = self.row_ends[slot] - MAX_HEAD_LAG
            missing = begin - max(self.head_ends[slot], lost)
            if missing > 0:
                assert begin == start, "entries of the head are missing"
                assert num_entries + missing > self.limits.token_budget, "there was room for them"
            if begin > self.head_ends[slot]:
                self.head_starts[slot] = begin
            end = len(self.tokens[slot]) - 1 if samples else start + count
            self.head_ends[slot] = end
            proposed += self._head_guesses(slot, begin, end, wanted)
        return Int32.of(proposed) if proposed else None

    def _head_guesses(self, slot: int, begin: int, end: int, wanted: int) -> list[int]:
        """Let the head compute the entries `begin` to `end` of the slot. Return `wanted` guesses of
        the tokens after the next one."""
        tokens, table, size = self.tokens[slot], self.tables[slot], self.limits.block_tokens
        assert begin < end < len(tokens)
        guesses: list[int] = []
        for _ in range(wanted):
            guesses.append(self.guess([*tokens[: end + 1], *guesses], self.seeds[slot], None))
        entries = [*tokens[begin + 1 : end + 1], *([GUESSED] * (wanted - 1))]
        for position, entry in enumerate(entries, begin):
            held = self.draft_kv.setdefault(table[position // size], [None] * size)
            held[position % size] = entry
        for position, found in enumerate(_positions(self.draft_kv, table, size, 0, end)):
            if position >= self.head_starts[slot]:
                assert found == tokens[position + 1], "an entry of the head is wrong"
            elif (position + 1) % size:  # the last entry of a cached block depends on its request
                right = (None, GUESSED, tokens[position + 1])
                assert found in right, "the head would read another's K/V"
        return guesses

    def _run_draft_model(self, plan: StepPlan) -> Int32 | None:
        if plan.follow_starts is None or plan.follow_tokens is None or plan.wanted is None:
            return None
        columns = (
            plan.row_slots,
            plan.row_samples,
            plan.follow_starts,
            plan.follow_tokens,
            plan.wanted,
        )
        proposed: list[int] = []
        for slot, samples, begin, count, wanted in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            assert not wanted or (samples and begin >= 0)
            assert not (wanted and count)
            assert count <= self.limits.token_budget
            end = len(self.tokens[slot]) if wanted else begin + count
            if begin >= 0:
                proposed += self._guesses(slot, begin, end, wanted)
        return Int32.of(proposed) if proposed else None

    def _guesses(self, slot: int, begin: int, end: int, wanted: int) -> list[int]:
        """Let the draft model compute the slot's tokens `begin` to `end`. Return `wanted` guesses
        of the tokens after them."""
        tokens, table, size = self.tokens[slot][:end], self.tables[slot], self.limits.block_tokens
        assert begin < end
        for position in range(begin, end):
            held = self.draft_kv.setdefault(table[position // size], [None] * size)
            held[position % size] = tokens[position]
        seen = _positions(self.draft_kv, table, size, 0, end)
        assert seen == tokens, "the draft model would read another's K/V"
        for _ in range(wanted):
            position = len(tokens)
            tokens.append(self.guess(tokens, self.seeds[slot], None))
            if position < end + wanted - 1:
                held = self.draft_kv.setdefault(table[position // size], [None] * size)
                held[position % size] = tokens[position]
        return tokens[end:]

    def _row(self, slot: int, start: int, count: int, samples: int, drafts: list[int]) -> list[int]:
        known, table, size = self.tokens[slot], self.tables[slot], self.limits.block_tokens
        tokens = known + drafts
        for index, window in enumerate(self._windows):
            own = table[index :: len(self._windows)]  # of the layers in a column's block `index`
            for position in range(start, start + count):
                assert own[position // size] != NULL_BLOCK, "a position has no block"
                self.kv[own[position // size]][position % size] = tokens[position] + index * VOCAB
            first = max(start + 1 - (window or start + 1), 0)
            seen = _positions(self.kv, own, size, first, start + count)
            right = tokens[first : start + count]
            if index:
                right = [token + index * VOCAB for token in right]
            assert seen == right, "attention would read another's K/V"
        assert self.states[slot] == tuple(tokens[:start]) or not self.limits.state_bytes, (
            "the row does not start with the state of the positions before it"
        )
        self.states[slot] = tuple(tokens[: start + count])
        if not samples:
            assert not drafts
            return []
        assert len(tokens) == start + count, "a sample that is not after the last known token"
        assert not drafts or count == 1 + len(drafts)
        before = len(known)
        places = [self._possible.pop(0) for _ in range(1 + len(drafts))]
        for possible, draft in zip(places, [*drafts, None], strict=True):
            known.append(self.sample(known, self.seeds[slot], possible))
            if known[-1] != draft:
                break
        self.states[slot] = tuple(known[:-1])
        return known[before:]

    def _first_state(self, init: SlotInit) -> tuple[int, ...]:
        """Return the state that a bound slot starts with, and check that it is the right one."""
        if not self.limits.state_bytes or not init.num_computed:
            assert init.checkpoint == NO_CHECKPOINT, "no checkpoint is needed"
            return ()
        state = self.checkpoints[init.checkpoint]
        seen = with_rows(init.tokens.tolist(), init.images)[: init.num_computed]
        assert state == tuple(seen), "another's checkpoint"
        return state

    def _save_states(self, plan: StepPlan) -> None:
        if plan.save_slots is None or plan.save_lens is None or plan.save_checkpoints is None:
            assert plan.save_slots is plan.save_lens is plan.save_checkpoints is None
            return
        starts, counts = plan.row_starts.tolist(), plan.row_tokens.tolist()
        rows = dict(zip(plan.row_slots.tolist(), zip(starts, counts, strict=True), strict=True))
        numbers, lengths = plan.save_checkpoints.tolist(), plan.save_lens.tolist()
        assert len(set(numbers)) == len(numbers), "two states are saved to one checkpoint"
        assert set(numbers) <= {*range(1, self.limits.num_checkpoints + 1)}
        for slot, length, number in zip(plan.save_slots.tolist(), lengths, numbers, strict=True):
            start, count = rows[slot]
            assert start < length <= start + count, "the row does not compute this state"
            assert length % self.limits.block_tokens == 0
            if length <= len(self.states[slot]):  # else it follows a wrong draft
                self.checkpoints[number] = self.states[slot][:length]


def _positions(
    kv: Mapping[int, list[int | None]], table: Sequence[int], size: int, first: int, end: int
) -> list[int | None]:
    """Return what the blocks of a table, of `size` positions each, have at positions `first` to
    `end`."""
    start = first // size
    found = [*chain.from_iterable(kv[block] for block in table[start : -(-end // size)])]
    return found[first - start * size : end - start * size]


def num_requested(plan: StepPlan) -> int:
    """Return the number of drafts that a plan requests of a draft model or head."""
    return 0 if plan.wanted is None else sum(plan.wanted.tolist())


def proposer_computes(plan: StepPlan) -> bool:
    """Return whether the draft model or head computes anything in a step."""
    return plan.follow_starts is not None


def drafts_of(plan: StepPlan) -> list[list[int]]:
    """Return the drafts of each row of a plan."""
    if plan.row_drafts is None or plan.drafts is None:
        assert plan.row_drafts is plan.drafts is None
        return [[] for _ in range(len(plan.row_slots))]
    ids = iter(plan.drafts.tolist())
    drafts = [list(islice(ids, count)) for count in plan.row_drafts.tolist()]
    assert not list(ids), "the plan has drafts that belong to no row"
    return drafts


def _possible(plan: StepPlan, masks: Masks | None) -> list[list[int] | None]:
    """Return the tokens that each sampled position's mask allows; None if it has no mask."""
    assert (masks is None) == (plan.masked is None), (
        "masks come only with a plan that has masked rows"
    )
    num_drafts = 0 if plan.drafts is None else len(plan.drafts)
    places: list[list[int] | None] = [None] * (sum(plan.row_samples.tolist()) + num_drafts)
    if masks is None or plan.masked is None:
        return places
    assert (masks.step, masks.bits.shape) == (plan.step, (len(plan.masked), -(-VOCAB // 32)))
    row_bytes = masks.bits.data.nbytes // len(plan.masked)
    for row, place in enumerate(plan.masked.tolist()):
        mask = masks.bits.data[row * row_bytes : (row + 1) * row_bytes]
        bits = int.from_bytes(mask, "little")
        places[place] = [token for token in range(VOCAB) if bits >> token & 1]
    return places


def a_card(**changes: object) -> ModelCard:
    fields: dict[str, object] = {
        "name": "echo",
        "architecture": "Echo",
        "digest": "00",
        "vocab_size": VOCAB,
        "context_tokens": 512,
        "tokenizer": signs_tokenizer(markers=False),
        "eos_token_ids": [EOS],
        "encoding": EncodingCard(task="embed", max_tokens=MAX_INPUT, size=ECHO_SIZE),
    }
    return ModelCard(**(fields | changes))  # type: ignore[arg-type]


@lru_cache
def echo_compiler() -> Compiler:
    """Return the compiler that all echo engines share. It stores no results."""
    return Compiler(a_card())


@lru_cache(maxsize=256)
def compiled(grammar: bytes) -> MatcherTemplate:
    """Return a grammar, given as MessagePack, as `echo_compiler` compiles it. A storm sends few
    grammars, thousands of times."""
    return echo_compiler().compile(msgspec.msgpack.decode(grammar, type=Grammar))


def draft_model_for(config: dict[str, Any]) -> str:
    """Return a model name if the engine's `config` uses a draft model, else ""."""
    return "a draft model" if config.get("speculation") == "model" else ""


class Bench:
    """An engine and an echo worker. All invariants of the engine are checked after every plan,
    commit, abort, compilation, K/V report and tick.

    outputs     (client, request) -> all of its outputs so far
    plans       all plans
    in_flight   plans that are not committed yet, oldest first
    masks       masks of the oldest plan in flight
    jobs        grammars that wait for `compile`
    refusals    requests that were refused because of their grammar
    not_reading clients for which results of encoding wait until `read`; others read at once
    """

    def __init__(
        self,
        *,
        token_budget: int = 64,
        block_tokens: int = 4,
        num_blocks: int = 65,
        max_slots: int = 8,
        max_len: int = 200,
        kv_window: int | None = None,
        kv_groups: KVGroups | None = None,
        state_bytes: int = 0,
        num_checkpoints: int = 0,
        prefix_cache: bool = True,
        max_waiting: int = 1000,
        max_waiting_tokens: int = 1_000_000,
        steps_in_flight: int = 1,
        sample: SampleToken = next_token,
        guess: SampleToken | None = None,
        draft_cost: float = 0.0,
        step_costs: Sequence[tuple[int, float]] = (),
        place: ClusterMember | None = None,
        tiers: Sequence[str] = (),
        adapters: Sequence[str] = (),
        max_adapters: int = 0,
        image_rows: int = 0,
        sees_whole_runs: bool = False,
        checks: bool = True,
        check_every: int = 1,
        draw_seed: Callable[[], int] = lambda: 0,
        **config: Any,
    ) -> None:
        """Build the engine and its worker.

        guess        the draft model; None: `sample`
        step_costs   (tokens, seconds) that a worker has measured
        place        membership in a cluster
        tiers        names of the worker's K/V tiers
        adapters     names of the LoRA adapters that the worker has loaded
        max_adapters rows of its table; 0: it has no adapters
        image_rows   rows of images that it can keep; 0: it reads no images
        sees_whole_runs   whether the rows of a run see each other
        checks       whether to check the engine's invariants
        check_every  check them after every n-th operation
        config       further fields of EngineConfig
        """
        self.limits = Limits(
            max_len=max_request_tokens(
                max_len,
                num_blocks=num_blocks,
                block_tokens=block_tokens,
                window=kv_window,
                groups=kv_groups,
            ),
            max_slots=max_slots,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            token_budget=token_budget,
            prefix_cache=prefix_cache,
            kv_window=kv_window,
            kv_groups=kv_groups,
            max_adapters=max_adapters,
            state_bytes=state_bytes,
            num_checkpoints=num_checkpoints,
            image_rows=image_rows,
        )
        self.config = EngineConfig(
            worker=WorkerConfig(
                model="",
                draft_model=draft_model_for(config),
                lora_dir=ROOT if max_adapters else "",
                block_tokens=block_tokens if state_bytes else 16,
            ),
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            steps_in_flight=steps_in_flight,
            **config,
        )
        self.engine = Engine(
            self.config,
            a_card(
                images=echo_images_card(sees_whole_runs=sees_whole_runs) if image_rows else None
            ),
            self.limits,
            draft_cost=draft_cost,
            step_costs=step_costs,
            draw_seed=draw_seed,
            cluster=None if place is None else place.cluster,
            tiers=tiers,
            adapters=[adapter_info(name) for name in adapters],
        )
        self.adapters = EchoAdapters([*adapters])
        uses_head = self.config.speculation == "mtp"
        self.worker = EchoWorker(self.limits, sample, guess or sample, uses_head)
        self.worker.echo_images.sees_whole_runs = sees_whole_runs
        memory = self.worker.kv, block_tokens, self.worker.checkpoints
        self.mover = None if place is None else EchoMover(place, *memory)
        self.tiers = EchoTiers(tiers, *memory)
        self.outputs: dict[tuple[bytes, int], list[Output]] = {}
        self.plans: list[StepPlan] = []
        self.in_flight: deque[StepPlan | EncodePlan] = deque()
        self.masks: Masks | None = None
        self.jobs: list[CompileJob] = []
        self.refusals: dict[tuple[bytes, int], Refused] = {}
        self.not_reading: set[bytes] = set()
        self._next = 0
        self._checks = checks
        self._check_every = check_every
        self._num_operations = 0

    def check(self) -> None:
        """Check the invariants after an operation, if this operation's turn has come."""
        self._num_operations += 1
        if self._checks and self._num_operations % self._check_every == 0:
            self.engine.check()

    def add(self, prompt: list[int], *asked: Any, **more: Any) -> int:
        """Add a request that is accepted or waits for its grammar. Return its number."""
        number = self.try_add(prompt, *asked, **more)
        assert isinstance(number, int), number
        return number

    def refusal(self, prompt: list[int], *asked: Any, **more: Any) -> Refused:
        """Add a request that is refused at once. Return the refusal."""
        reply = self.try_add(prompt, *asked, **more)
        assert isinstance(reply, Refused), reply
        return reply

    def try_add(
        self,
        prompt: list[int],
        client: bytes = CLIENT,
        namespace: str = "",
        priority: int = 0,
        grammar: Body | Grammar | None = None,
        labels: Sequence[str] = (),
        kv_readers: int = 0,
        kv_handle: str = "",
        account: Account | None = None,
        is_first: bool = True,
        timeout_s: float = 0.0,
        queue_timeout_s: float = 0.0,
        answer: list[int] | None = None,
        mirostat_mu: float | None = None,
        adapter: str = "",
        adapter_digest: str = "",
        attachments: Sequence[Attachment] = (),
        **params: Any,
    ) -> int | Refused:
        """Add a request. Return its number, or the refusal. A new grammar waits for `compile`."""
        self._next += 1
        message = Generate(
            request=self._next,
            prompt=Int32.of(prompt),
            params=SamplingParams(**params),
            namespace=namespace,
            priority=priority,
            grammar=grammar if isinstance(grammar, Grammar | None) else Grammar(body=grammar),
            labels=list(labels),
            kv_readers=kv_readers,
            kv_handle=kv_handle,
            account=account,
            is_first=is_first,
            timeout_s=timeout_s,
            queue_timeout_s=queue_timeout_s,
            answer=None if answer is None else Int32.of(answer),
            mirostat_mu=mirostat_mu,
            adapter=adapter,
            adapter_digest=adapter_digest,
            attachments=list(attachments),
        )
        reply = self.engine.add(client, message)
        self.jobs += self.engine.drain_compile_jobs()
        if isinstance(reply, Refused):
            return reply
        assert reply in (Accepted(request=self._next), None)
        self.outputs[client, self._next] = []
        return self._next

    def encode(self, *inputs: list[int], **more: Any) -> int:
        """Add a request that encodes, and that is accepted. Return its number."""
        number = self.try_encode(*inputs, **more)
        assert isinstance(number, int), number
        return number

    def try_encode(
        self,
        *inputs: list[int],
        client: bytes = CLIENT,
        splits: list[int] | None = None,
        **more: Any,
    ) -> int | Refused:
        """Add a request that encodes. Return its number, or the refusal."""
        self._next += 1
        message = Encode(
            request=self._next,
            inputs=EncodeInputs(
                tokens=Int32.of(chain.from_iterable(inputs)),
                lengths=Int32.of(map(len, inputs)),
                splits=None if splits is None else Int32.of(splits),
            ),
            **more,
        )
        reply = self.engine.add_encode(client, message)
        self.check()
        if isinstance(reply, Refused):
            return reply
        self.outputs[client, self._next] = []
        return self._next

    def vectors(self, number: int, client: bytes = CLIENT) -> list[list[float]]:
        """Return the results of a request that encodes."""
        vectors = self.last_output(number, client).vectors
        assert vectors is not None
        flat = vectors.tolist()
        return [flat[place : place + ECHO_SIZE] for place in range(0, len(flat), ECHO_SIZE)]

    def compile(self, which: int = 0, num_bytes: int = 0) -> dict[int, Accepted | Refused]:
        """Compile the grammar `jobs[which]`, which then takes `num_bytes`. Return {request: reply}
        for the requests that waited for it."""
        job = self.jobs.pop(which)
        result: MatcherTemplate | ServingError
        try:
            result = compiled(msgspec.msgpack.encode(job.grammar))
        except ServingError as error:
            result = error
        replies = self.engine.on_grammar_compiled(CompiledGrammar(job.digest, result, num_bytes))
        for client, reply in replies:
            if isinstance(reply, Refused):
                del self.outputs[client, reply.request]
                self.refusals[client, reply.request] = reply
        self.check()
        return {reply.request: reply for _, reply in replies}

    def abort(self, *numbers: int, client: bytes = CLIENT) -> None:
        self._keep(client, self.engine.abort(client, numbers))
        self.check()

    def abort_by_label(self, *names: str) -> dict[str, bool]:
        """Abort all requests with these labels. Return, for each label, whether an open request had
        it."""
        ends, known = self.engine.abort_by_label(names)
        for client, outputs in ends.items():
            self._keep(client, outputs)
        self.check()
        return known

    def plan(self) -> StepPlan | EncodePlan | None:
        self.adapters.commands += self.engine.adapters.drain_commands()
        plan = self.engine.plan()
        self.send_kv_commands()
        self.worker.echo_images.apply(self.engine.images.drain_commands(), plan)
        if plan is not None:
            if isinstance(plan, StepPlan):
                self.adapters.check(plan)
                self.plans.append(plan)
            self.in_flight.append(plan)
            if self.masks is None:
                self.masks = self.engine.masks()
        self.check()
        return plan

    def attach(self, *images: Attachment) -> None:
        """Send the content of these images, of ECHO_ROW_BYTES for each row."""
        for image in images:
            self.engine.attach(image.digest, [], image.num_tokens * ECHO_ROW_BYTES)
        self.check()

    def encode_image(self, error: str = "") -> bool:
        """Let the worker encode the next image, or fail with `error`. Return False if there is
        none."""
        report = self.worker.echo_images.encode_next(error)
        if report is None:
            return False
        for client, outputs in self.engine.on_image_encoded(report).items():
            self._keep(client, outputs.outputs)
        self.check()
        return True

    def finish(self, elapsed_s: float = 0.01) -> None:
        """Let the worker execute the oldest plan in flight, and commit its result."""
        plan = self.in_flight[0]
        if isinstance(plan, EncodePlan):
            self.in_flight.popleft()
            for client, outputs in self.engine.commit_encoded(
                self.worker.encode(plan), elapsed_s
            ).items():
                self._keep(client, outputs.outputs)
            self.check()
            for client in self.engine.encoding.unsent.clients - self.not_reading:
                self.read(client)
        else:
            self.commit(self.worker.execute(plan, self.masks), elapsed_s)

    def read(self, client: bytes = CLIENT, num_bytes: int = 1 << 30) -> None:
        """Let a client read results of encoding that wait for it: as many as have `num_bytes`."""
        if client in self.engine.encoding.unsent.clients:
            self._keep(client, self.engine.pop_results(client, num_bytes).outputs)
        self.check()

    def commit(self, result: StepResult, elapsed_s: float = 0.01) -> None:
        """Commit the result of the oldest plan in flight."""
        self.in_flight.popleft()
        for client, outputs in self.engine.commit(result, elapsed_s).items():
            self._keep(client, outputs.outputs)
        self.masks = self.engine.masks()
        self.send_kv_commands()
        self.check()

    def send_kv_commands(self) -> None:
        """Pass the engine's new K/V commands on to the tiers and the mover."""
        for order in self.engine.drain_kv_commands():
            if isinstance(order, KVFetch):
                for block in order.blocks.tolist():
                    self.worker.draft_kv[block] = [None] * self.limits.block_tokens
            match order:
                case KVStore() | KVUsed() | KVFetch(source=TierSource()):
                    self.tiers.apply(order)
                case KVCancel(job=job) if self.mover is None or job in self.tiers.jobs:
                    self.tiers.apply(order)
                case _:
                    assert self.mover is not None, order
                    self.mover.apply(order)

    def load_adapter(self, name: str, path: str = "", request: int = 1) -> Refused | None:
        """Start to load an adapter, or return the refusal. `run_adapter` continues."""
        message = LoadAdapter(request=request, name=name, path=path or name)
        return self._sent_adapters(self.engine.load_adapter(CLIENT, message))

    def unload_adapter(self, name: str, request: int = 2) -> Refused | None:
        """Start to unload an adapter, or return the refusal."""
        message = UnloadAdapter(request=request, name=name)
        return self._sent_adapters(self.engine.unload_adapter(CLIENT, message))

    def _sent_adapters(self, reply: Refused | None) -> Refused | None:
        self.adapters.commands += self.engine.adapters.drain_commands()
        self.check()
        return reply

    def run_adapter(self, *, fails: bool = False) -> None:
        """Let the worker carry out its oldest command about adapters."""
        self.adapters.commands += self.engine.adapters.drain_commands()
        self.adapters.run(self.engine, fails=fails)
        self.check()

    def tick(self, now: float) -> None:
        for client, outputs in self.engine.tick(now).items():
            self._keep(client, outputs.outputs)
        self.send_kv_commands()
        self.check()

    def on_kv_report(self, report: KVReport) -> None:
        """Pass a K/V report of the worker on to the engine."""
        self.send_kv_commands()
        for client, outputs in self.engine.on_kv_report(report).items():
            self._keep(client, outputs.outputs)
        self.check()

    def step(self) -> dict[int, int] | None:
        """Make all plans that are possible, and finish the oldest. Return {slot: tokens} of that
        plan's rows, or of its inputs, or None if there was nothing to do."""
        while self.plan() is not None:
            pass
        if not self.in_flight:
            return {} if self.encode_image() else None
        plan = self.in_flight[0]
        self.finish()
        if isinstance(plan, EncodePlan):
            return dict(enumerate(plan.inputs.lengths.tolist()))
        return dict(zip(plan.row_slots.tolist(), plan.row_tokens.tolist(), strict=True))

    def run(self, most: int = 100_000) -> None:
        for _ in range(most):
            if self.step() is None:
                return
        raise AssertionError(f"the engine is not idle after {most} steps")

    def _keep(self, client: bytes, outputs: list[Output]) -> None:
        for output in outputs:
            so_far = self.outputs[client, output.request]
            assert not so_far or so_far[-1].finish is None, "an output after the end"
            so_far.append(output)

    def tokens(self, number: int, client: bytes = CLIENT) -> list[int]:
        return [token for output in self.outputs[client, number] for token in output.tokens]

    def last_output(self, number: int, client: bytes = CLIENT) -> Output:
        return self.outputs[client, number][-1]

    def usage(self, number: int) -> Usage:
        usage = self.last_output(number).usage
        assert usage is not None
        return usage
