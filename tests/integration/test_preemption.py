"""Preemption loses nothing: forced at every step of a run, it changes no token and no logprob.

The blocks are taken away before the k-th plan, so that the youngest must yield; they come back when
it has. Blocks hold one token: whoever streams needs one at every step. With the prefix cache
off a request that yields is computed anew, with it on it finds what nobody took.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from protocol.grammar import Body, Grammar, Regex
from protocol.messages import Output, TokenLogprobs
from protocol.sampling import SamplingParams
from tests.support.recording import tiny_model
from tests.support.replica import Replica
from worker.models.load import LoadedModel

ASKED: list[tuple[list[int], SamplingParams, Body | None]] = [
    (
        [7, 8, 9],
        SamplingParams(temperature=1.3, seed=5, max_tokens=27, min_tokens=27, logprobs=3),
        None,
    ),
    (
        [*range(30, 41)],
        SamplingParams(
            temperature=0.9,
            frequency_penalty=1.5,
            presence_penalty=0.5,
            repetition_penalty=1.5,
            max_tokens=18,
            ignore_eos=True,
            logprobs=2,
            logprobs_of="both",
            prompt_logprobs=2,
        ),
        None,
    ),
    (
        [1, 2, 3, 4, 5],
        SamplingParams(temperature=1.5, max_tokens=12, logprobs=1, logprobs_of="sampling"),
        Regex(pattern="[ab]{9}c"),
    ),
    (
        [60, 61, 60, 61, 60],
        SamplingParams(
            temperature=0.0,
            bad_words=[[i] for i in range(50)] + [[60, 61]],
            max_tokens=14,
            stop_token_ids=[*range(70, 74)],
            min_tokens=6,
            logprob_token_ids=[3, 60],
        ),
        None,
    ),
]
"""What must survive: seeds, penalties, where a grammar is, what an answer has said, its ends."""
TOKEN_BUDGET = 6
"""Prompts are computed in chunks: some yield in the middle of one."""
POOL = 120


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


@dataclass
class Run:
    """All that was asked, served; `ends` is what came of each, as (tokens, finish, numbers)."""

    loaded: LoadedModel
    prefix_cache: bool
    steps_in_flight: int
    preempt_at: int | None = None

    def __post_init__(self) -> None:
        self.replica = Replica(
            self.loaded,
            token_budget=TOKEN_BUDGET,
            max_slots=3,  # one waits: it comes into a slot that somebody had
            num_blocks=POOL + 1,
            block_tokens=1,
            prefix_cache=self.prefix_cache,
            steps_in_flight=self.steps_in_flight,
            max_len=40,
        )
        for prompt, params, body in ASKED:
            self.replica.add(prompt, params, None if body is None else Grammar(body=body))
        self.num_steps = 0
        while self._step():
            self.num_steps += 1
        self.replica.engine.check()

    def _step(self) -> bool:
        if self.num_steps != self.preempt_at:
            return self.replica.step()
        self._force()
        return True

    def _force(self) -> None:
        """Leave no block free until somebody has yielded. Where the only one yields there is no
        plan at all, and so no step."""
        pool, engine = self.replica.engine.scheduler.pool, self.replica.engine
        taken: list[int] = []
        before = engine.stats().num_preemptions
        while engine.stats().num_preemptions == before:
            taken += pool.allocate(pool.num_free) or []
            if not self.replica.step():
                break
        pool.release(taken)

    @property
    def news(self) -> list[list[Output]]:
        return list(self.replica.outputs.values())

    @property
    def num_preemptions(self) -> int:
        return sum(usage.preemptions for news in self.news if (usage := news[-1].usage))


def said(news: list[Output]) -> tuple[object, ...]:
    """Tokens, ends, and the ids of all logprobs, which no batch changes."""
    tokens = [token for output in news for token in output.tokens]
    ids = [(told.token_id, told.top_ids) for told in all_logprobs(news)]
    return tokens, news[-1].finish, news[-1].stop_token, ids


def all_logprobs(news: list[Output]) -> list[TokenLogprobs]:
    return [one for output in news for one in (*output.prompt_logprobs, *output.logprobs)]


def values(news: list[Output]) -> Iterator[float]:
    for told in all_logprobs(news):
        yield from (told.logprob, *told.top_logprobs, *told.asked_logprobs, *told.drawn_logprobs)


@pytest.mark.parametrize(("prefix_cache", "steps_in_flight"), [(False, 1), (True, 2)])
def test_preemption_at_any_step_changes_no_token_and_no_logprob(
    loaded, prefix_cache, steps_in_flight
):
    whole = Run(loaded, prefix_cache, steps_in_flight)
    assert whole.num_preemptions == 0
    assert whole.num_steps > 25
    assert {news[-1].finish for news in whole.news} == {"stop", "length"}
    num_yielded = 0
    for step in range(whole.num_steps):
        run = Run(loaded, prefix_cache, steps_in_flight, preempt_at=step)
        num_yielded += run.num_preemptions > 0
        for before, after in zip(whole.news, run.news, strict=True):
            assert said(before) == said(after), f"preempted in step {step}"
            assert list(values(before)) == pytest.approx(list(values(after)), abs=2e-5)
    # Before the first step nobody runs, and in the last nobody needs a block any more.
    assert num_yielded >= whole.num_steps - 2
