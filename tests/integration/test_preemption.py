"""Preemption loses nothing: forced at any step of a run, it changes no token and no logprob.

Before one plan of a run, the test takes all free blocks, so that the youngest request is preempted.
It returns the blocks afterwards. A block holds one token, so a decoding request needs a new block
at every step. With the prefix cache off, a preempted request is computed anew. With the cache on,
the request reuses the blocks that were not taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from protocol.engine.grammar import Body, Grammar, Regex
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import Output
from protocol.engine.sampling import SamplingParams
from tests.support.recording import tiny_model
from tests.support.replica import Replica
from worker.loading.decoder import LoadedModel

REQUESTS: list[tuple[list[int], SamplingParams, Body | None]] = [
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
        [11, 12],
        SamplingParams(
            temperature=1.6,
            mirostat=2,
            mirostat_tau=2.0,
            mirostat_eta=0.9,
            max_tokens=16,
            ignore_eos=True,
            logprobs=1,
            logprobs_of="sampling",
        ),
        None,
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
"""(prompt, params, body of the grammar). They depend on all that a preemption must not lose: seeds,
penalties, Mirostat, the state of a grammar, the tokens of an answer, and the conditions that end
it."""
TOKEN_BUDGET = 6
"""Small, so prompts are computed in chunks, and some requests are preempted in the middle of
one."""
POOL = 120


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


@dataclass
class Run:
    """A run of all requests. `preempt_at` is the step in which a preemption is forced."""

    loaded: LoadedModel
    prefix_cache: bool
    steps_in_flight: int
    preempt_at: int | None = None

    def __post_init__(self) -> None:
        self.replica = Replica(
            self.loaded,
            token_budget=TOKEN_BUDGET,
            max_slots=3,  # one request waits, and gets a slot that another has used
            num_blocks=POOL + 1,
            block_tokens=1,
            prefix_cache=self.prefix_cache,
            steps_in_flight=self.steps_in_flight,
            max_len=40,
        )
        for prompt, params, body in REQUESTS:
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
        """Leave no block free until a request has been preempted. If no other request runs, there
        is nothing to plan, so no step is made."""
        pool, engine = self.replica.engine.scheduler.pool, self.replica.engine
        taken: list[int] = []
        before = engine.stats().num_preemptions
        while engine.stats().num_preemptions == before:
            taken += pool.allocate(pool.num_free) or []
            if not self.replica.step():
                break
        pool.release(taken)

    @property
    def outputs(self) -> list[list[Output]]:
        return list(self.replica.outputs.values())

    @property
    def num_preemptions(self) -> int:
        return sum(usage.preemptions for outputs in self.outputs if (usage := outputs[-1].usage))


def exact_parts(outputs: list[Output]) -> tuple[object, ...]:
    """Return the tokens, the finish reason, the stop token, and the ids of all logprobs. None of
    them depends on the batch."""
    tokens = [token for output in outputs for token in output.tokens]
    ids = [(entry.token_id, entry.top_ids) for entry in all_logprobs(outputs)]
    return tokens, outputs[-1].finish, outputs[-1].stop_token, ids


def all_logprobs(outputs: list[Output]) -> list[TokenLogprobs]:
    return [entry for output in outputs for entry in (*output.prompt_logprobs, *output.logprobs)]


def values(outputs: list[Output]) -> Iterator[float]:
    for entry in all_logprobs(outputs):
        yield from (
            entry.logprob,
            *entry.top_logprobs,
            *entry.asked_logprobs,
            *entry.drawn_logprobs,
        )


@pytest.mark.parametrize(("prefix_cache", "steps_in_flight"), [(False, 1), (True, 2)])
def test_preemption_at_any_step_changes_no_token_and_no_logprob(
    loaded, prefix_cache, steps_in_flight
):
    whole = Run(loaded, prefix_cache, steps_in_flight)
    assert whole.num_preemptions == 0
    assert whole.num_steps > 25
    assert {outputs[-1].finish for outputs in whole.outputs} == {"stop", "length"}
    num_preempted = 0
    for step in range(whole.num_steps):
        run = Run(loaded, prefix_cache, steps_in_flight, preempt_at=step)
        num_preempted += run.num_preemptions > 0
        for before, after in zip(whole.outputs, run.outputs, strict=True):
            assert exact_parts(before) == exact_parts(after), f"preempted in step {step}"
            assert list(values(before)) == pytest.approx(list(values(after)), abs=2e-5)
    # Before the first step no request runs, and in the last no request needs another block.
    assert num_preempted >= whole.num_steps - 2
