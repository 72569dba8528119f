"""Plans by hand, and a scripted planner: what an engine would say, without an engine.

`Planner` gives each life of a request (each binding) a slot of its own; `reuse_slots` rewrites a
recorded stream so that freed slots are taken again at once. Both streams ask for the same
computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from protocol.arrays import Int32, UInt8
from protocol.sampling import SamplingParams
from protocol.steps import SlotInit, StepPlan, StepResult
from tests.support.tiny_model import BLOCK_TOKENS

GREEDY = SamplingParams(temperature=0.0)


def slot_init(
    slot: int,
    tokens: Sequence[int],
    *,
    generation: int = 1,
    prompt_tokens: int | None = None,
    num_computed: int = 0,
    blocks: Sequence[int] = (),
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    params: SamplingParams = GREEDY,
) -> SlotInit:
    return SlotInit(
        slot=slot,
        generation=generation,
        tokens=Int32.of(tokens),
        prompt_tokens=len(tokens) if prompt_tokens is None else prompt_tokens,
        num_computed=num_computed,
        blocks=Int32.of(blocks),
        seed=seed,
        stop_ids=list(stop_ids),
        params=params,
    )


def step_plan(
    step: int = 0,
    *,
    release: Sequence[int] = (),
    bind: Sequence[SlotInit] = (),
    extend: Sequence[tuple[int, int, int]] = (),
    zero: Sequence[int] = (),
    rows: Sequence[tuple[int, int, int, bool]] = (),
    masked: Sequence[int] = (),
) -> StepPlan:
    """rows: (slot, first position, how many, sampled); those of one token are put first.

    masked: indexes into the sampled rows, as they then are.
    """
    rows = sorted(rows, key=lambda row: row[2] != 1)
    slots, indexes, ids = zip(*extend, strict=True) if extend else ((), (), ())
    return StepPlan(
        step=step,
        release=Int32.of(release),
        bind=list(bind),
        block_slots=Int32.of(slots),
        block_indexes=Int32.of(indexes),
        block_ids=Int32.of(ids),
        zero_blocks=Int32.of(zero),
        row_slots=Int32.of(row[0] for row in rows),
        row_starts=Int32.of(row[1] for row in rows),
        row_tokens=Int32.of(row[2] for row in rows),
        row_samples=UInt8.of(row[3] for row in rows),
        num_decodes=sum(row[2] == 1 for row in rows),
        masked=Int32.of(masked) if masked else None,
    )


@dataclass
class Script:
    """One request and what befalls it.

    arrives        the step from which it may start
    preempt_after  after so many generated tokens it loses its slot and blocks, and starts over
    handed_over    its prompt but for one token is computed in one slot, the rest in another
    abort_at       the step at which it is dropped, whatever it does
    """

    prompt: list[int]
    params: SamplingParams
    num_new: int = 6
    seed: int = 0
    stop_ids: list[int] = field(default_factory=list)
    arrives: int = 0
    preempt_after: int | None = None
    handed_over: bool = False
    abort_at: int | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.blocks: list[int] = []
        self.slot: int | None = None
        self.num_computed = 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt)


@dataclass(frozen=True)
class Recorded:
    """A plan and the blocks that had become free, and nobody's, before it."""

    plan: StepPlan
    freed: list[int]


class Planner:
    def __init__(
        self, scripts: Iterable[Script], *, num_blocks: int, max_running: int, token_budget: int
    ) -> None:
        self.waiting = list(scripts)
        self.running: list[Script] = []
        self.free = list(range(num_blocks - 1, 0, -1))
        self.max_running = max_running
        self.token_budget = token_budget
        self.num_lives = 0
        self.step = 0
        self._release: list[int] = []
        self._freed: list[int] = []

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.running and not self._release

    def plan(self) -> Recorded:
        for script in [s for s in self.running if s.abort_at == self.step]:
            self._leave(script)
        self.waiting = [s for s in self.waiting if s.abort_at != self.step]
        release, self._release = self._release, []
        freed, self._freed = self._freed, []
        bind, extend, zero, rows = [], [], [], []
        self._admit(bind)
        fresh = {init.slot for init in bind}
        budget = self.token_budget
        self._sampled: list[Script] = []
        for script in sorted(self.running, key=lambda s: len(s.tokens) - s.num_computed):
            target = len(script.prompt) - 1 if self._hands_over(script) else len(script.tokens)
            count = min(target - script.num_computed, budget)
            if count <= 0:
                continue
            zero += self._extend(script, script.num_computed + count, extend)
            samples = script.num_computed + count == len(script.tokens)
            rows.append((script.slot, script.num_computed, count, samples))
            script.num_computed += count
            budget -= count
        self.step += 1
        by_slot = {s.slot: s for s in self.running}
        bind = [
            replace(init, blocks=Int32.of(by_slot[init.slot].blocks))
            if init.slot in fresh
            else init
            for init in bind
        ]
        extend = [item for item in extend if item[0] not in fresh]
        plan = step_plan(self.step, release=release, bind=bind, extend=extend, zero=zero, rows=rows)
        self._sampled = [
            by_slot[slot]
            for slot, sampled in zip(
                plan.row_slots.tolist(), plan.row_samples.tolist(), strict=True
            )
            if sampled
        ]
        return Recorded(plan, [block for block in freed if block not in zero])

    def commit(self, result: StepResult) -> None:
        for script, token in zip(self._sampled, result.tokens.tolist(), strict=True):
            script.tokens.append(token)
            if script.num_generated == script.num_new:
                self._leave(script)
            elif script.num_generated == script.preempt_after:
                script.preempt_after = None
                self._leave(script)
                self.waiting.insert(0, script)
        for script in list(self.running):
            if self._hands_over(script) and script.num_computed == len(script.prompt) - 1:
                self._hand_over(script)

    def _hands_over(self, script: Script) -> bool:
        return script.handed_over and script.num_computed < len(script.prompt)

    def _hand_over(self, script: Script) -> None:
        """Its blocks stay; another slot goes on, as if they had come from another node."""
        self.running.remove(script)
        self._release.append(script.slot)
        script.slot, script.handed_over = None, False
        self.waiting.insert(0, script)

    def _admit(self, bind: list[SlotInit]) -> None:
        for script in [s for s in self.waiting if s.arrives <= self.step]:
            needed = -(-(len(script.prompt) + script.num_new) // BLOCK_TOKENS)
            if len(self.running) >= self.max_running or len(self.free) < needed:
                return
            self.waiting.remove(script)
            self.running.append(script)
            script.slot, self.num_lives = self.num_lives, self.num_lives + 1
            bind.append(
                slot_init(
                    script.slot,
                    script.tokens,
                    prompt_tokens=len(script.prompt),
                    num_computed=script.num_computed,
                    seed=script.seed,
                    stop_ids=script.stop_ids,
                    params=script.params,
                )
            )

    def _extend(self, script: Script, known: int, extend: list[tuple[int, int, int]]) -> list[int]:
        new = []
        while len(script.blocks) * BLOCK_TOKENS < known:
            new.append(self.free.pop())
            extend.append((script.slot, len(script.blocks), new[-1]))
            script.blocks.append(new[-1])
        return new

    def _leave(self, script: Script) -> None:
        self.running.remove(script)
        self._release.append(script.slot)
        self._freed += script.blocks
        self.free += script.blocks
        script.slot, script.blocks, script.num_computed = None, [], 0


def reuse_slots(stream: Iterable[Recorded]) -> list[Recorded]:
    """The same stream, each binding in the lowest free slot: as an engine with few slots plans."""
    free: list[int] = []
    now: dict[int, int] = {}
    generations: dict[int, int] = {}

    def take(life: int) -> int:
        slot = min(free, default=len(generations))
        if slot in free:
            free.remove(slot)
        generations[slot] = generations.get(slot, -1) + 1
        now[life] = slot
        return slot

    rewritten = []
    for recorded in stream:
        plan = recorded.plan
        release = [now.pop(life) for life in plan.release.tolist()]
        free.extend(release)
        bind = []
        for init in plan.bind:
            slot = take(init.slot)
            bind.append(replace(init, slot=slot, generation=generations[slot]))
        plan = replace(
            plan,
            release=Int32.of(release),
            bind=bind,
            block_slots=Int32.of(now[life] for life in plan.block_slots.tolist()),
            row_slots=Int32.of(now[life] for life in plan.row_slots.tolist()),
        )
        rewritten.append(Recorded(plan, recorded.freed))
    return rewritten
