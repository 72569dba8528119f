"""Requests that continue the answer of a lost engine: the same tokens, limits, usage and load."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from protocol.engine.grammar import Body, ChoiceGrammar, Regex
from protocol.engine.messages import Account, Refused
from protocol.engine.stats import EngineLoad
from protocol.wire.errors import InvalidRequest
from tests.support.engines import Bench, answer, guess_with_accuracy, repetitive_token
from tests.support.handover import KVNetwork

PROMPT = list(range(1, 20))
CONFIGS = {
    "plain": {},
    "two steps in flight": {"steps_in_flight": 2},
    "small budget": {"token_budget": 3},
    "window": {"kv_window": 8, "prefix_cache": False},
    "n-grams": {"speculation": "ngram", "sample": repetitive_token, "max_drafts": 4},
    "draft model": {
        "speculation": "model",
        "sample": repetitive_token,
        "guess": guess_with_accuracy(0.7, repetitive_token),
        "max_drafts": 4,
    },
    "own head": {
        "speculation": "mtp",
        "sample": repetitive_token,
        "guess": guess_with_accuracy(0.7, repetitive_token),
        "max_drafts": 4,
    },
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_an_answer_continued_from_any_token_ends_as_it_would_have(config: dict) -> None:  # type: ignore[type-arg]
    sample = config.get("sample")
    whole = answer(PROMPT, 30, 5, **({} if sample is None else {"sample": sample}))
    for cut in range(len(whole)):
        bench = Bench(**config)
        number = bench.add(PROMPT, max_tokens=30, seed=5, answer=whole[:cut])
        bench.run()
        assert bench.tokens(number) == whole[cut:]
        assert bench.usage(number).prompt_tokens == len(PROMPT)
        assert bench.usage(number).generated_tokens == len(whole)
        assert bench.last_output(number).finish == ("stop" if len(whole) < 30 else "length")


GRAMMARS: list[Body] = [ChoiceGrammar(choices=["abc", "abd", "xy"]), Regex(pattern="[ab]{2,12}c")]


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_continued_answer_goes_on_in_its_grammar(grammar: Body, is_compiled: bool) -> None:
    alone = Bench()
    first = alone.add(PROMPT, grammar=grammar, max_tokens=30, seed=3)
    alone.compile()
    alone.run()
    whole = alone.tokens(first)
    for cut in range(len(whole)):
        bench = Bench()
        if is_compiled:
            bench.add(PROMPT, grammar=grammar, max_tokens=1)
            bench.compile()
        number = bench.add(PROMPT, grammar=grammar, max_tokens=30, seed=3, answer=whole[:cut])
        if not is_compiled:
            bench.compile()
        bench.run()
        assert whole[:cut] + bench.tokens(number) == whole


def test_an_answer_that_its_grammar_does_not_admit_is_refused() -> None:
    bench = Bench()
    number = bench.add(PROMPT, grammar=GRAMMARS[0], answer=[90, 91])
    bench.compile()
    refused = bench.refusals[b"client", number]
    assert refused.error.param == "answer"
    again = bench.refusal(PROMPT, grammar=GRAMMARS[0], answer=[90, 91])
    assert again.error.message == refused.error.message
    assert bench.engine.is_idle


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"answer": [5] * 4, "max_tokens": 4}, "4 tokens already"),
        ({"answer": [5] * 181}, "181 tokens already"),
        ({"answer": [97]}, "97"),
    ],
)
def test_an_answer_that_cannot_be_continued_is_refused(fields: dict, why: str) -> None:  # type: ignore[type-arg]
    refused = Bench().refusal(PROMPT, **fields)
    assert refused.error.code == InvalidRequest.code
    assert (refused.error.param or "").startswith("answer")
    assert why in refused.error.message


def test_an_answer_with_mirostat_needs_its_state_to_be_continued() -> None:
    for mu in (None, math.nan):
        refused = Bench().refusal(PROMPT, answer=[5], mirostat_mu=mu, mirostat=2)
        assert (refused.error.code, refused.error.param) == (InvalidRequest.code, "mirostat_mu")
    bench = Bench()
    bench.add(PROMPT, mirostat=2, mirostat_tau=3.0)
    bench.add(PROMPT, mirostat=1, answer=[5], mirostat_mu=1.25)
    bench.add(PROMPT, answer=[5])
    bench.run()
    assert [init.mirostat_mu for plan in bench.plans for init in plan.bind] == [6.0, 1.25, 0.0]


def test_an_answer_is_not_continued_from_another_engines_kv() -> None:
    bench = Bench(place=KVNetwork().member("p"), role="prefill")
    refused = bench.refusal(PROMPT, answer=[5], kv_readers=1)
    assert (refused.error.code, refused.error.param) == (InvalidRequest.code, "answer")


def test_a_continued_request_is_not_refused_by_a_full_queue() -> None:
    bench = Bench(max_waiting=1)
    bench.add(PROMPT)
    assert isinstance(bench.try_add(PROMPT), Refused)
    bench.add(PROMPT, answer=[])
    bench.run()


def test_a_continued_request_is_neither_limited_nor_charged() -> None:
    limited = Account(name="alice", requests_per_minute=1, concurrency=1)
    bench = Bench()
    bench.add(PROMPT, account=limited, answer=[5])
    bench.add(PROMPT, account=limited, answer=[])
    bench.run()
    bench.add(PROMPT, account=limited)  # the one request of this minute
    assert "concurrency" in bench.refusal(PROMPT, account=limited).error.message
    bench.run()
    assert "requests_per_minute" in bench.refusal(PROMPT, account=limited).error.message


def test_the_first_output_of_a_continued_answer_has_no_usage() -> None:
    """The client already has a usage with its first token, from the lost engine."""
    bench = Bench()
    number = bench.add(PROMPT, max_tokens=9, answer=[5, 6], prompt_logprobs=1)
    bench.run()
    outputs = bench.outputs[b"client", number]
    assert [output.usage is not None for output in outputs] == [False] * 6 + [True]
    assert not any(output.prompt_logprobs for output in outputs)


def test_no_cached_token_of_the_answer_counts_as_a_prompt_token() -> None:
    bench = Bench()
    whole = answer(PROMPT, 30, 5)
    for _ in range(2):
        number = bench.add(PROMPT, max_tokens=30, seed=5, answer=whole[:-1])
        bench.run()
    assert bench.usage(number).cached_tokens == len(PROMPT)


def test_the_load_counts_running_and_waiting_requests_and_their_tokens() -> None:
    bench = Bench(token_budget=16, max_slots=2, prefix_cache=False)
    for _ in range(3):
        bench.add([7] * 20, max_tokens=3, ignore_eos=True)
    loads = []
    while bench.plan() is not None:
        result = bench.worker.execute(bench.in_flight[0])
        loads.append(bench.engine.load)
        bench.commit(result)
    # 16 of the first prompt; its last 4 and 12 of the second; the last 8 of the second; ...
    assert loads[0] == EngineLoad(1, 2, 4 + 40)
    assert loads[1] == EngineLoad(2, 1, 8 + 20)
    assert loads[2] == EngineLoad(2, 1, 20)
    assert bench.engine.load == EngineLoad(0, 0, 0)
    assert all(now.queued_tokens <= before.queued_tokens for before, now in pairwise(loads))


def test_the_outputs_of_a_step_carry_the_load_after_it() -> None:
    bench = Bench()
    bench.add(PROMPT, max_tokens=1)
    bench.add(PROMPT, max_tokens=5, client=b"other")
    bench.plan()
    outputs = bench.engine.commit(bench.worker.execute(bench.in_flight[0]), 0.01)
    assert {frame.load for frame in outputs.values()} == {EngineLoad(1, 0, 0)}
