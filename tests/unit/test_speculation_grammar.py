"""Drafts for answers that a grammar constrains: none that it refuses, a mask at every place, and
the same answers as without."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from engine_core.speculation.drafting import RequestDrafting
from protocol.arrays import Int32
from protocol.grammar import (
    Body,
    ChoiceGrammar,
    Grammar,
    JsonSchema,
    Lark,
    Regex,
    Thinking,
    ThinkingBudget,
)
from protocol.steps import Masks, StepPlan, StepResult
from tests.support.engines import EOS, Bench, drafts_of, echo_compiler, habitual_token
from tests.support.grammars import ids_of, schema, text_of

BUDGET = ThinkingBudget(most=5, opens=["(("], closes=["))"], inside=True)
THINKING = Thinking(opens="((", closes="))", inside=True)
KINDS: list[Grammar] = [
    Grammar(body=Regex(pattern="([ab]{2}c){1,12}d")),
    Grammar(body=ChoiceGrammar(choices=["abcabcabcabc", "abcabcabcabd"])),
    Grammar(
        body=JsonSchema(text=schema(name={"type": "string"}, name_of_pet={"enum": ["a", "b"]}))
    ),
    Grammar(body=Lark(text='start: "<" start ">" | "."')),
    Grammar(body=None, budget=BUDGET),
    Grammar(body=ChoiceGrammar(choices=["yes" * 5, "no" * 9]), budget=BUDGET, thinking=THINKING),
]
PROMPT = ids_of("ababcabcab")


class WatchedDrafter(Bench):
    """Keeps the masks of each plan that was executed."""

    def __init__(self, **options: object) -> None:
        super().__init__(say=habitual_token, ngram_min=1, **options)  # type: ignore[arg-type]
        self.executed: list[tuple[StepPlan, Masks | None]] = []

    def finish(self, elapsed_s: float = 0.01) -> None:
        self.executed.append((self.out[0], self.masks))
        super().finish(elapsed_s)


def serve(speculation: str, depth: int = 1) -> tuple[WatchedDrafter, list[tuple[str | None, str]]]:
    """All kinds, with several seeds, and what each said."""
    bench = WatchedDrafter(speculation=speculation, steps_in_flight=depth)
    numbers = []
    for seed in range(4):
        for grammar in KINDS:
            number = bench.add(PROMPT[seed:], grammar=grammar, seed=seed, max_tokens=60)
            numbers.append(number)
        while bench.jobs:
            bench.compile()
    bench.run()
    assert bench.engine.is_idle
    return bench, [(bench.end(n).finish, text_of(bench.tokens(n))) for n in numbers]


def test_answers_are_the_same_with_and_without_drafts_one_step_at_a_time_or_two() -> None:
    plain, said = serve("none")
    assert {finish for finish, _ in said} == {"stop", "length"}
    for depth in (1, 2):
        fast, also = serve("ngram", depth)
        assert also == said
        stats = fast.engine.stats()
        assert stats.num_accepted_tokens > 100
        assert len(fast.plans) < len(plain.plans)


def test_every_place_of_a_constrained_row_has_its_mask_which_admits_the_draft_there() -> None:
    """So no draft is verified that the grammar refuses. Free text has masks where the budget
    forces a token, or may."""
    fast, _ = serve("ngram")
    num_places = 0
    for plan, masks in fast.executed:
        if plan.drafts is None:
            continue
        by_place = masks_of(plan, masks)
        place = 0
        rows = zip(drafts_of(plan), plan.row_samples.tolist(), strict=True)
        for drafts in (drafts for drafts, samples in rows if samples):
            for draft in drafts:
                assert by_place[place] >> draft & 1, "a draft that the grammar refuses"
                place += 1
                num_places += 1
            assert place in by_place or not drafts, "no mask behind the last draft"
            assert by_place.get(place, 1), "nothing can follow the last draft"
            place += 1
    assert num_places > 100


def masks_of(plan: StepPlan, masks: Masks | None) -> dict[int, int]:
    """Of each masked place, its bits."""
    assert plan.masked is not None
    assert masks is not None
    size = masks.bits.data.nbytes // len(plan.masked)
    bits = (masks.bits.data[i : i + size] for i in range(0, masks.bits.data.nbytes, size))
    numbers = (int.from_bytes(some, "little") for some in bits)
    return dict(zip(plan.masked.tolist(), numbers, strict=True))


def run_of(text: str, body: Body, most: int = 64) -> str:
    """What is guessed of `body` behind `text` without any past."""
    matcher = echo_compiler().compile(Grammar(body=body)).start()
    for token in ids_of(text):
        matcher.consume(token)
    return text_of(matcher.forced_tokens(most))


def test_text_that_a_grammar_forces_is_drafted_without_any_past() -> None:
    body = JsonSchema(text=schema(favourite_colour={"enum": ["red", "green"]}))
    assert run_of('{"', body) == 'favourite_colour"'
    assert run_of('{"favourite_colour":"g', body, 3) == "ree"
    plain, fast = (Bench(speculation=kind) for kind in ("none", "ngram"))
    for bench in (plain, fast):
        number = bench.add([5, 6, 7], grammar=body, max_tokens=60)
        bench.compile()
        bench.run()
        assert list(json.loads(text_of(bench.tokens(number)))) == ["favourite_colour"]
    assert plain.tokens(number) == fast.tokens(number)
    assert len(fast.plans) < len(plain.plans) - 10
    usage = fast.usage(number)
    assert usage.accepted_tokens == len(plain.plans) - len(fast.plans)


def test_forced_drafts_do_not_count_for_drafts_from_the_past() -> None:
    bench = Bench(speculation="ngram")
    body = JsonSchema(text=schema(favourite_colour={"enum": ["red", "green"]}))
    number = bench.add([5, 6, 7], grammar=body, max_tokens=60)
    bench.compile()
    while not bench.tokens(number):
        bench.step()
    (request,) = bench.engine.scheduler.running
    before = request.drafting.tally.checked
    while not request.num_accepted:
        bench.step()
    assert request.drafting.tally.checked <= before
    assert request.drafting.forced_tally.accepted > 0


def test_a_model_that_spells_forced_text_differently_gets_no_forced_drafts_in_the_end() -> None:
    """Every sign is a token here; so a model that never says what is expected stands for one."""
    guesses = RequestDrafting(drafter=None)  # type: ignore[arg-type]
    guesses.is_forced = True
    before = guesses.forced_tally.acceptance
    guesses.observe(8, 0, token=7)
    assert not guesses.is_forced
    assert guesses.forced_tally.acceptance < before / 1.5
    assert guesses.tally.checked == 0


def test_drafts_end_before_the_token_that_completes_the_answer() -> None:
    matcher = echo_compiler().compile(Grammar(body=ChoiceGrammar(choices=["yes"]))).start()
    assert text_of(matcher.admitted_prefix(ids_of("yesyes"))) == "ye"
    assert text_of(matcher.admitted_prefix(ids_of("yo"))) == "y"
    many = echo_compiler().compile(Grammar(body=Regex(pattern="(ab)+"))).start()
    assert text_of(many.admitted_prefix([*ids_of("abab"), EOS, 5])) == "abab"
    assert text_of(matcher.admitted_prefix(ids_of("yes"))) == "ye", "looking moves nothing"


@pytest.mark.parametrize("body", [None, Regex(pattern=r"\(*a+\)+b*")], ids=["free", "grammar"])
def test_drafts_keep_to_the_budget_of_thinking(body: Body | None) -> None:
    budget = ThinkingBudget(most=2, opens=["(("], closes=["))"], inside=True)
    matcher = echo_compiler().compile(Grammar(body=body, budget=budget)).start()
    assert text_of(matcher.admitted_prefix(ids_of("aaaa"))) == "aa"
    assert text_of(matcher.admitted_prefix(ids_of("aa))bb"))) == "aa))bb"
    along = [m.forced for m in matcher.walk(ids_of("aa))b"))]
    closing = ids_of(")")[0]
    assert along == [None, closing, closing, None, None]
    assert matcher.forced is None


def test_a_grammar_too_large_after_accepted_drafts_still_reports_its_limit() -> None:
    """The place was first seen by a copy of the matcher."""
    large = {"type": "object", "properties": {f"n{i}": {"type": "string"} for i in range(2000)}}
    body = JsonSchema(text=json.dumps({"type": "object", "properties": {"far": large}}))
    text = '{"far":{"'

    def say(tokens: list[int], seed: int = 0, possible: list[int] | None = None) -> int:
        wish = ids_of((text * 4)[(len(tokens) - len(prompt)) :])[0]
        return wish if possible is None or wish in possible else 0

    prompt, said = ids_of(text * 3), []
    for speculation in ("none", "ngram"):
        bench = Bench(speculation=speculation, say=say, max_drafts=64, draft_width=1024)
        number = bench.add(prompt, grammar=body, max_tokens=60)
        bench.compile()
        while bench.plan() is not None:
            result = bench.worker.execute(bench.out[0], bench.masks)
            bench.commit(failing_where_nothing_is_possible(result))
        end = bench.end(number)
        assert (end.finish, end.error.code, end.error.param) == (
            "error",
            "invalid_request",
            "grammar",
        )
        assert "max is" in end.error.message
        said.append(text_of(bench.tokens(number)))
    assert text.startswith(said[0])
    assert said[0] == said[1]
    assert bench.engine.stats().num_accepted_tokens > 0


def failing_where_nothing_is_possible(result: StepResult) -> StepResult:
    """As the worker reports a row for which its mask leaves nothing: its last token is 0."""
    return result if result.tokens.tolist()[-1] else replace(result, failed=Int32.of([0]))
