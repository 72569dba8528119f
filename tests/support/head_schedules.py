"""Random schedules of requests whose drafts a tiny model's own head proposes, and the same answers
computed without drafts.

A schedule draws the limits of an engine, its requests and the steps before which they arrive. Some
requests are aborted, and sometimes the engine is replaced by another one in the middle, which
continues the unfinished answers. The compiled kernels compute a position with the same bits in
every batch, so every answer must be the same as without drafts, whatever was drawn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.engine.sampling import SamplingParams
from protocol.wire.arrays import Int32
from tests.support.draft_heads import write_with_head
from tests.support.eager import some_tokens
from tests.support.kernels import native_kernels
from tests.support.replica import Replica, load, load_own_head
from worker.loading.decoder import LoadedModel
from worker.loading.draft_head import LoadedHead

FEW = 6
"""Size of the models' vocabularies: small enough for a random head to be right sometimes."""
MAX_TOKENS = 14
NUM_PROMPTS, TEMPERATURES = 12, (0.0, 0.9)


@dataclass
class DraftedModel:
    """A tiny model with a head, and the answers that it gives without drafts."""

    loaded: LoadedModel
    head: LoadedHead
    prompts: list[list[int]]
    answers: dict[tuple[int, float], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, model_type: str, **changes: Any) -> DraftedModel:
        """Write a model to `path` and load it. `changes` are arguments of `write_with_head`."""
        write_with_head(path, model_type, hidden_size=192, vocab_size=FEW, **changes)
        loaded = load(path, kernels=native_kernels(), weights="packed")
        # Some prompts start with an earlier one, and share its blocks.
        prompts = [some_tokens(5 + 3 * number, number, FEW) for number in range(NUM_PROMPTS // 2)]
        prompts += [prompt + some_tokens(7, 50, FEW) for prompt in prompts]
        model = cls(loaded, load_own_head(path, loaded), prompts)
        plain = Replica(loaded, block_tokens=4)
        numbers = {
            (which, temperature): plain.add(prompt, _params(which, temperature))
            for which, prompt in enumerate(prompts)
            for temperature in TEMPERATURES
        }
        plain.run()
        model.answers = {key: plain.tokens(number) for key, number in numbers.items()}
        return model


def _params(which: int, temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=which, max_tokens=MAX_TOKENS, ignore_eos=True
    )


@dataclass
class HeadSchedule:
    """One random schedule.

    asked      the requests: which prompt, its temperature, and the tokens of its answer that
               earlier engines have computed
    numbers    number of each request in the present engine
    """

    model: DraftedModel
    seed: int
    asked: list[tuple[int, float, list[int]]] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    accepted: int = 0
    preempted: int = 0
    replaced: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._replica = self._new_replica()

    def run(self) -> None:
        """Run the schedule, and check every answer."""
        missing = self._random.randrange(2, 8)
        while missing or self._has_open:
            if missing and self._random.random() < 0.4:
                missing -= 1
                which = self._random.randrange(NUM_PROMPTS)
                self.asked.append((which, self._random.choice(TEMPERATURES), []))
                self._add(len(self.asked) - 1)
            chance = self._random.random()
            if chance < 0.02 and self.numbers:
                self._abort()
            elif chance < 0.04 and not self._replica.out:
                self._replace()
            else:
                self._replica.step()
        self._replica.run()
        self._count()
        for index, (which, temperature, before) in enumerate(self.asked):
            answer, right = self._tokens(index, before), self.model.answers[which, temperature]
            is_whole = index not in self.aborted
            assert answer == (right if is_whole else right[: len(answer)]), f"seed {self.seed}"

    @property
    def _has_open(self) -> bool:
        return any(not self._replica.is_ended(number) for number in self.numbers.values())

    def _new_replica(self) -> Replica:
        draw, size = self._random.choice, self._random.choice([4, 8])
        options = {"speculation": "mtp", "max_drafts": draw([1, 2, 4, 8])}
        return Replica(
            self.model.loaded,
            head=self.model.head,
            block_tokens=size,
            num_blocks=1 + draw([48, 64, 160]) // size,
            num_checkpoints=draw([4, 24]),
            token_budget=draw([6, 16, 64]),
            max_slots=draw([2, 4, 6]),
            prefix_cache=draw([False, True]),
            steps_in_flight=draw([1, 2]),
            draft_cost=draw([0.0, 0.0, 0.1, 0.3]),
            options=options,
        )

    def _add(self, index: int) -> None:
        which, temperature, before = self.asked[index]
        self.numbers[index] = self._replica.add(
            self.model.prompts[which],
            _params(which, temperature),
            answer=Int32.of(before) if before else None,
        )

    def _tokens(self, index: int, before: list[int]) -> list[int]:
        number = self.numbers.get(index)
        return before if number is None else before + self._replica.tokens(number)

    def _abort(self) -> None:
        index = self._random.choice([*self.numbers])
        if not self._replica.is_ended(self.numbers[index]):
            self.aborted.add(index)
            self._replica.abort(self.numbers[index])

    def _replace(self) -> None:
        """Let another engine, with other limits, continue all open requests."""
        self._count()
        self.replaced += 1
        old, numbers = self._replica, self.numbers
        self.asked = [
            (which, temperature, self._tokens(index, before))
            for index, (which, temperature, before) in enumerate(self.asked)
        ]
        still = [index for index, number in numbers.items() if not old.is_ended(number)]
        self._replica, self.numbers = self._new_replica(), {}
        for index in still:
            self._add(index)

    def _count(self) -> None:
        stats = self._replica.engine.stats()
        self.accepted += stats.num_accepted_tokens
        self.preempted += stats.num_preemptions
