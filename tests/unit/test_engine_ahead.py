"""Steps that are planned before the previous step has committed."""

from __future__ import annotations

from protocol.engine.grammar import ChoiceGrammar
from protocol.wire.arrays import Int32
from protocol.worker.steps import StepResult
from tests.support.engines import EOS, Bench, answer
from tests.support.grammars import ids_of


def ahead(**options: object) -> Bench:
    return Bench(steps_in_flight=2, **options)  # type: ignore[arg-type]


def test_the_next_step_is_planned_while_a_token_is_in_flight() -> None:
    bench = ahead()
    number = bench.add([1, 2, 3], max_tokens=5, ignore_eos=True)
    first, second = bench.plan(), bench.plan()
    assert (first.row_starts.tolist(), first.row_tokens.tolist()) == ([0], [3])
    assert (second.row_starts.tolist(), second.row_tokens.tolist()) == ([3], [1])
    assert bench.plan() is None, "no more than two"
    assert bench.tokens(number) == []
    bench.run()
    assert bench.tokens(number) == answer([1, 2, 3], 5, ignore_eos=True)


def test_a_full_answer_is_not_computed_beyond_its_end() -> None:
    bench = ahead()
    number = bench.add([1, 2, 3], max_tokens=2, ignore_eos=True)
    bench.run()
    assert [plan.row_tokens.tolist() for plan in bench.plans] == [[3], [1]]
    assert bench.last_output(number).finish == "length"


def test_a_request_for_its_prompt_only_is_planned_ahead_in_chunks() -> None:
    bench = ahead(token_budget=4)
    number = bench.add([1] * 10, max_tokens=0)
    bench.run()
    assert [plan.row_tokens.tolist() for plan in bench.plans] == [[4], [4], [2]]
    assert (bench.last_output(number).finish, bench.tokens(number)) == ("length", [])


def test_tokens_after_the_end_are_dropped_and_their_blocks_stay_until_the_commit() -> None:
    bench = ahead(num_blocks=11)
    pairs = ([first, second] for first in range(97) for second in range(97))
    prompt = next(pair for pair in pairs if answer(pair, 1) == [EOS])
    number = bench.add(prompt, max_tokens=20)
    bench.plan()
    bench.plan()
    bench.finish()
    assert (bench.last_output(number).finish, bench.tokens(number)) == ("stop", [EOS])
    assert bench.engine.stats().free_blocks < 10, "a step in flight still writes to them"
    assert not bench.engine.is_idle
    bench.finish()
    assert bench.engine.stats().free_blocks == 10
    assert bench.engine.is_idle


def test_a_failed_row_produces_no_more_output() -> None:
    bench = ahead()
    bad = bench.add([1] * 4, max_tokens=4, ignore_eos=True)
    good = bench.add([2] * 4, max_tokens=4, ignore_eos=True)
    bench.plan()
    bench.plan()
    result = bench.worker.execute(bench.in_flight[0])
    bench.commit(StepResult(step=result.step, tokens=result.tokens, failed=Int32.of([0])))
    bench.run()
    assert bench.last_output(bad).finish == "error"
    assert bench.tokens(good) == answer([2] * 4, 4, ignore_eos=True)


def test_preemption_waits_for_the_plans_in_flight() -> None:
    bench = ahead(num_blocks=9, block_tokens=4, max_slots=2)
    numbers = [bench.add([n] * 13, max_tokens=16, ignore_eos=True) for n in (1, 2)]
    bench.run()
    assert bench.engine.stats().num_preemptions > 0
    for number, first in zip(numbers, (1, 2), strict=True):
        assert bench.tokens(number) == answer([first] * 13, 16, ignore_eos=True)


def test_masks_follow_the_commit_that_they_depend_on() -> None:
    bench = ahead()
    bench.add([1], grammar=ChoiceGrammar(choices=["abc", "xyz"]), max_tokens=10)
    bench.compile()
    first, second = bench.plan(), bench.plan()
    assert bench.masks.step == first.step
    assert bench.engine.masks() is None, "the masks of the second step are not known yet"
    bench.finish()
    assert bench.masks.step == second.step


def test_a_step_planned_past_the_end_of_an_answer_still_has_masks() -> None:
    bench = ahead()
    bound = bench.add([1], grammar=ChoiceGrammar(choices=["a"]), max_tokens=10)
    free = bench.add([2], max_tokens=3, ignore_eos=True)
    bench.compile()
    bench.plan()
    bench.plan()
    bench.finish()
    assert (bench.last_output(bound).finish, bench.tokens(bound)) == ("stop", ids_of("a"))
    bench.run()
    assert bench.tokens(free) == answer([2], 3, ignore_eos=True)


def test_a_token_outside_the_grammar_ends_its_answer_with_a_step_in_flight() -> None:
    bench = ahead()
    number = bench.add([1], grammar=ChoiceGrammar(choices=["abc"]), max_tokens=10)
    bench.compile()
    bench.plan()
    bench.plan()
    result = bench.worker.execute(bench.in_flight[0], bench.masks)
    wrong = Int32.of(ids_of("z"))
    bench.commit(StepResult(step=result.step, tokens=wrong, failed=result.failed))
    bench.run()
    assert bench.last_output(number).finish == "error"
    assert bench.engine.is_idle


def test_a_step_with_as_many_rows_but_another_request_has_its_own_columns() -> None:
    bench = ahead()
    first, second = (bench.add([n, n], max_tokens=9, ignore_eos=True) for n in (1, 2))
    bench.step()
    assert bench.in_flight[-1].row_slots.tolist() == [0, 1]
    bench.abort(first)
    third = bench.add([3], max_tokens=9, ignore_eos=True)
    plan = bench.plan()
    assert (plan.row_slots.tolist(), plan.row_starts.tolist()) == ([1, 2], [3, 0])
    bench.run()
    assert bench.tokens(second) == answer([2, 2], 9, ignore_eos=True)
    assert bench.tokens(third) == answer([3], 9, ignore_eos=True)
