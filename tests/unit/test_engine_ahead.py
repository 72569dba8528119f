"""Plans that go out before the one before them has come back."""

from __future__ import annotations

import random

import pytest

from protocol.arrays import Int32
from protocol.grammar import ChoiceGrammar, Regex
from protocol.steps import StepResult
from tests.support.engines import EOS, Bench, answer, next_token
from tests.support.grammars import ids_of


def ahead(**options: object) -> Bench:
    return Bench(steps_in_flight=2, **options)  # type: ignore[arg-type]


def endless(prompt: list[int], count: int) -> list[int]:
    """What an answer that ignores its end says."""
    known = list(prompt)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(prompt) :]


def test_the_next_step_is_planned_while_a_token_is_on_its_way() -> None:
    bench = ahead()
    number = bench.add([1, 2, 3], max_tokens=5, ignore_eos=True)
    first, second = bench.plan(), bench.plan()
    assert first is not None
    assert second is not None
    assert (first.row_starts.tolist(), first.row_tokens.tolist()) == ([0], [3])
    assert (second.row_starts.tolist(), second.row_tokens.tolist()) == ([3], [1])
    assert bench.plan() is None, "no more than two"
    assert bench.tokens(number) == []
    bench.run()
    assert bench.tokens(number) == endless([1, 2, 3], 5)


def test_a_full_answer_is_not_computed_beyond_its_end() -> None:
    bench = ahead()
    number = bench.add([1, 2, 3], max_tokens=2, ignore_eos=True)
    bench.run()
    assert [plan.row_tokens.tolist() for plan in bench.plans] == [[3], [1]]
    assert bench.end(number).finish == "length"


def test_a_prompt_alone_is_computed_in_chunks_ahead_and_then_ends() -> None:
    bench = ahead(token_budget=4)
    number = bench.add([1] * 10, max_tokens=0)
    bench.run()
    assert [plan.row_tokens.tolist() for plan in bench.plans] == [[4], [4], [2]]
    assert (bench.end(number).finish, bench.tokens(number)) == ("length", [])


def test_what_was_computed_behind_an_end_is_dropped_and_its_blocks_wait_for_it() -> None:
    bench = ahead(num_blocks=11)
    pairs = ([first, second] for first in range(97) for second in range(97))
    prompt = next(pair for pair in pairs if answer(pair, 1) == [EOS])
    number = bench.add(prompt, max_tokens=20)
    bench.plan()
    bench.plan()
    bench.finish()
    assert (bench.end(number).finish, bench.tokens(number)) == ("stop", [EOS])
    assert bench.engine.stats().free_blocks < 10, "a step that is out still writes to them"
    assert not bench.engine.is_idle
    bench.finish()
    assert bench.engine.stats().free_blocks == 10
    assert bench.engine.is_idle


def test_a_row_that_failed_is_not_heard_of_again() -> None:
    bench = ahead()
    bad = bench.add([1] * 4, max_tokens=4, ignore_eos=True)
    good = bench.add([2] * 4, max_tokens=4, ignore_eos=True)
    bench.plan()
    bench.plan()
    result = bench.worker.execute(bench.out[0])
    bench.commit(StepResult(step=result.step, tokens=result.tokens, failed=Int32.of([0])))
    bench.run()
    assert bench.end(bad).finish == "error"
    assert bench.tokens(good) == endless([2] * 4, 4)


def test_nobody_is_preempted_while_a_plan_is_out() -> None:
    bench = ahead(num_blocks=9, block_tokens=4, max_slots=2)
    numbers = [bench.add([n] * 13, max_tokens=16, ignore_eos=True) for n in (1, 2)]
    bench.run()
    assert bench.engine.stats().num_preemptions > 0
    for number, first in zip(numbers, (1, 2), strict=True):
        assert bench.tokens(number) == endless([first] * 13, 16)


def test_masks_follow_the_commit_that_they_depend_on() -> None:
    bench = ahead()
    bench.add([1], grammar=ChoiceGrammar(choices=["abc", "xyz"]), max_tokens=10)
    bench.compile()
    first, second = bench.plan(), bench.plan()
    assert first is not None
    assert second is not None
    assert bench.masks is not None
    assert bench.masks.step == first.step
    assert bench.engine.masks() is None, "the second step's are not known yet"
    bench.finish()
    assert bench.masks is not None
    assert bench.masks.step == second.step


def test_a_step_behind_a_complete_answer_has_masks_all_the_same() -> None:
    bench = ahead()
    bound = bench.add([1], grammar=ChoiceGrammar(choices=["a"]), max_tokens=10)
    free = bench.add([2], max_tokens=3, ignore_eos=True)
    bench.compile()
    bench.plan()
    bench.plan()
    bench.finish()
    assert (bench.end(bound).finish, bench.tokens(bound)) == ("stop", ids_of("a"))
    bench.run()
    assert bench.tokens(free) == endless([2], 3)


def test_a_token_that_misleads_a_grammar_ends_its_answer_with_a_step_out() -> None:
    bench = ahead()
    number = bench.add([1], grammar=ChoiceGrammar(choices=["abc"]), max_tokens=10)
    bench.compile()
    bench.plan()
    bench.plan()
    result = bench.worker.execute(bench.out[0], bench.masks)
    wrong = Int32.of(ids_of("z"))
    bench.commit(StepResult(step=result.step, tokens=wrong, failed=result.failed))
    bench.run()
    assert bench.end(number).finish == "error"
    assert bench.engine.is_idle


@pytest.mark.parametrize("seed", range(6))
def test_one_step_at_a_time_and_two_say_the_same(seed: int) -> None:
    """One load of all kinds, with aborts at random times; what was said is compared as far as
    both have said it."""
    said = []
    for depth in (1, 2):
        random_load, random_times = random.Random(seed), random.Random(seed + depth)
        bench = Bench(
            steps_in_flight=depth,
            token_budget=16,
            num_blocks=33,
            max_slots=4,
            max_len=60,
            prefix_cache=bool(seed % 2),
        )
        numbers = []
        for _ in range(60):
            prompt = [random_load.randrange(3) for _ in range(random_load.randrange(1, 30))]
            constrained = random_load.random() < 0.3
            number = bench.add(
                prompt,
                grammar=Regex(pattern="[ab]{2,9}c") if constrained else None,
                max_tokens=random_load.randrange(25),
                seed=random_load.randrange(3),
                ignore_eos=random_load.random() < 0.7,
            )
            assert isinstance(number, int)
            numbers.append(number)
            while bench.jobs:
                bench.compile()
            for _ in range(random_times.randrange(6)):
                bench.step()
            if random_load.random() < 0.1:
                bench.abort(random_load.choice(numbers))
        bench.run()
        ends = [(bench.end(n).finish, bench.tokens(n)) for n in numbers]
        said.append(ends)
        assert bench.engine.is_idle
    for (one_end, one), (two_end, two) in zip(*said, strict=True):
        if "abort" in (one_end, two_end):
            shorter = min(len(one), len(two))
            assert one[:shorter] == two[:shorter]
        else:
            assert (one_end, one) == (two_end, two)
