"""Drafts for constrained answers: the grammar admits them, every place has a mask, and the
answers are the same as without drafts."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from engine_core.requests.drafting import RequestDrafting
from protocol.engine.grammar import (
    Body,
    ChoiceGrammar,
    Grammar,
    JsonSchema,
    Lark,
    Regex,
    Thinking,
    ThinkingBudget,
)
from protocol.wire.arrays import Int32
from protocol.worker.steps import Masks, StepPlan, StepResult
from tests.support.engines import EOS, Bench, drafts_of, echo_compiler, repetitive_token
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
    """A bench that stores each executed plan with its masks."""

    def __init__(self, **options: object) -> None:
        super().__init__(sample=repetitive_token, ngram_min=1, **options)  # type: ignore[arg-type]
        self.executed: list[tuple[StepPlan, Masks | None]] = []

    def finish(self, elapsed_s: float = 0.01) -> None:
        plan = self.in_flight[0]
        assert isinstance(plan, StepPlan)
        self.executed.append((plan, self.masks))
        super().finish(elapsed_s)


def serve(speculation: str, depth: int = 1) -> tuple[WatchedDrafter, list[tuple[str | None, str]]]:
    """Answer all KINDS with several seeds. Return the bench, and (finish, text) of each answer."""
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
    return bench, [(bench.last_output(n).finish, text_of(bench.tokens(n))) for n in numbers]


def test_constrained_answers_are_the_same_with_and_without_drafts() -> None:
    plain, answers = serve("none")
    assert {finish for finish, _ in answers} == {"stop", "length"}
    for depth in (1, 2):
        fast, fast_answers = serve("ngram", depth)
        assert fast_answers == answers
        stats = fast.engine.stats()
        assert stats.num_accepted_tokens > 100
        assert len(fast.plans) < len(plain.plans)


def test_the_mask_of_each_place_admits_its_draft() -> None:
    """Each draft is admitted by the mask of its place, and a token can follow the last draft. A row
    with drafts has a mask at every place, even in free text under a thinking budget."""
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
                assert by_place[place] >> draft & 1, "the grammar excludes the draft"
                place += 1
                num_places += 1
            assert place in by_place or not drafts, "no mask after the last draft"
            assert by_place.get(place, 1), "nothing can follow the last draft"
            place += 1
    assert num_places > 100


def masks_of(plan: StepPlan, masks: Masks | None) -> dict[int, int]:
    """Return a dict from each place that has a mask to the bits of its mask, as an integer."""
    assert plan.masked is not None
    assert masks is not None
    size = masks.bits.data.nbytes // len(plan.masked)
    bits = (masks.bits.data[i : i + size] for i in range(0, masks.bits.data.nbytes, size))
    numbers = (int.from_bytes(some, "little") for some in bits)
    return dict(zip(plan.masked.tolist(), numbers, strict=True))


def forced_text(text: str, body: Body, most: int = 64) -> str:
    """Return the text that `body` forces after `text`."""
    matcher = echo_compiler().compile(Grammar(body=body)).start()
    for token in ids_of(text):
        matcher.consume(token)
    return text_of(matcher.forced_tokens(most))


def test_text_that_a_grammar_forces_is_drafted_without_earlier_tokens() -> None:
    body = JsonSchema(text=schema(favourite_colour={"enum": ["red", "green"]}))
    assert forced_text('{"', body) == 'favourite_colour"'
    assert forced_text('{"favourite_colour":"g', body, 3) == "ree"
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


def test_forced_drafts_do_not_count_as_n_gram_drafts() -> None:
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


def test_wrong_forced_drafts_lower_only_the_forced_acceptance() -> None:
    """Forced drafts are wrong if the model spells the forced text with other tokens."""
    drafting = RequestDrafting(drafter=None)  # type: ignore[arg-type]
    drafting.is_forced = True
    before = drafting.forced_tally.acceptance
    drafting.observe(8, 0, token=7)
    assert not drafting.is_forced
    assert drafting.forced_tally.acceptance < before / 1.5
    assert drafting.tally.checked == 0


def test_drafts_end_before_the_token_that_completes_the_answer() -> None:
    matcher = echo_compiler().compile(Grammar(body=ChoiceGrammar(choices=["yes"]))).start()
    assert text_of(matcher.admitted_prefix(ids_of("yesyes"))) == "ye"
    assert text_of(matcher.admitted_prefix(ids_of("yo"))) == "y"
    many = echo_compiler().compile(Grammar(body=Regex(pattern="(ab)+"))).start()
    assert text_of(many.admitted_prefix([*ids_of("abab"), EOS, 5])) == "abab"
    assert text_of(matcher.admitted_prefix(ids_of("yes"))) == "ye", "the matcher was not advanced"


@pytest.mark.parametrize("body", [None, Regex(pattern=r"\(*a+\)+b*")], ids=["free", "grammar"])
def test_drafts_keep_to_the_thinking_budget(body: Body | None) -> None:
    budget = ThinkingBudget(most=2, opens=["(("], closes=["))"], inside=True)
    matcher = echo_compiler().compile(Grammar(body=body, budget=budget)).start()
    assert text_of(matcher.admitted_prefix(ids_of("aaaa"))) == "aa"
    assert text_of(matcher.admitted_prefix(ids_of("aa))bb"))) == "aa))bb"
    along = [m.forced for m in matcher.walk(ids_of("aa))b"))]
    closing = ids_of(")")[0]
    assert along == [None, closing, closing, None, None]
    assert matcher.forced is None


def test_a_grammar_too_large_after_accepted_drafts_still_reports_its_limit() -> None:
    """With drafts, a copy of the matcher computes the mask that exceeds the limit."""
    large = {"type": "object", "properties": {f"n{i}": {"type": "string"} for i in range(2000)}}
    body = JsonSchema(text=json.dumps({"type": "object", "properties": {"far": large}}))
    text = '{"far":{"'

    def say(tokens: list[int], seed: int = 0, possible: list[int] | None = None) -> int:
        token = ids_of((text * 4)[(len(tokens) - len(prompt)) :])[0]
        return token if possible is None or token in possible else 0

    prompt, answers = ids_of(text * 3), []
    for speculation in ("none", "ngram"):
        bench = Bench(speculation=speculation, sample=say, max_drafts=64, draft_width=1024)
        number = bench.add(prompt, grammar=body, max_tokens=60)
        bench.compile()
        while bench.plan() is not None:
            result = bench.worker.execute(bench.in_flight[0], bench.masks)
            bench.commit(mark_failed_row(result))
        end = bench.last_output(number)
        assert (end.finish, end.error.code, end.error.param) == (
            "error",
            "invalid_request",
            "grammar",
        )
        assert "max is" in end.error.message
        answers.append(text_of(bench.tokens(number)))
    assert text.startswith(answers[0])
    assert answers[0] == answers[1]
    assert bench.engine.stats().num_accepted_tokens > 0


def mark_failed_row(result: StepResult) -> StepResult:
    """Return `result`, but with its row marked as failed if the last token is 0, which stands for a
    mask that allows no token."""
    return result if result.tokens.tolist()[-1] else replace(result, failed=Int32.of([0]))
