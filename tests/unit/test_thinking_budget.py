"""The thinking budget: at its limit the block is closed, and nothing else is constrained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import msgspec
import pytest

from engine_core.grammar.compiler import Compiler
from engine_core.grammar.matcher import Matcher
from engine_core.grammar.thinking_budget import is_cut
from gateway.formats.model_format import ModelOutputFormat
from gateway.text.tokenizer import Tokenizer
from protocol.engine.grammar import (
    Body,
    ChoiceGrammar,
    Grammar,
    JsonObject,
    LiteralForm,
    Rules,
    Thinking,
    ThinkingBudget,
    check_grammar,
)
from protocol.wire.errors import InvalidRequest
from tests.support.engines import Bench
from tests.support.grammars import MARKERS, ids_of, possible, signs_card, text_of
from tests.support.scripted_engine import thinking_card
from tests.support.tokenizers import family_card, tokenizer_of

TOKENS = {"opens": ["<think>"], "closes": ["</think>"]}
SPELT = {"opens": ["((", "[["], "closes": ["))", "]]"]}
MIXED = {"opens": ["a<think>b"], "closes": ["c</think>d"]}
OPEN, CLOSE = MARKERS["<think>"], MARKERS["</think>"]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(signs_card())


def budget(most: int, markers: dict[str, list[str]], *, inside: bool = False) -> ThinkingBudget:
    return ThinkingBudget(most=most, inside=inside, **markers)


def spelt(text: str) -> list[int]:
    """Return the tokens of `text`, in which each marker is one token."""
    ids: list[int] = []
    while text:
        name = next((name for name in MARKERS if text.startswith(name)), text[0])
        ids += [MARKERS[name]] if name in MARKERS else ids_of(name)
        text = text[len(name) :]
    return ids


def written(matcher: Matcher, size: int, wishes: Iterable[int], most: int = 60) -> list[int]:
    """Return the answer of a model that tries to write the tokens `wishes` one by one.

    If a token is not allowed, the model writes the smallest allowed token and tries again.
    """
    answer: list[int] = []
    remaining = iter(wishes)
    wish = next(remaining, None)
    while wish is not None and not matcher.is_complete and len(answer) < most:
        allowed = possible(matcher, size) if matcher.constrains else {wish}
        token = wish if wish in allowed else min(allowed)
        matcher.consume(token)
        assert matcher.error is None
        answer.append(token)
        if token == wish:
            wish = next(remaining, None)
    return answer


def answer_text(compiler: Compiler, grammar: Grammar, wishes: str) -> str:
    check_grammar(grammar)
    matcher = compiler.compile(grammar).start()
    return text_of(written(matcher, compiler.vocab_size, spelt(wishes)))


@pytest.mark.parametrize(
    ("limit", "wishes", "answer"),
    [
        (budget(3, TOKENS, inside=True), "abcdef", "abc</think>def"),
        (budget(0, TOKENS, inside=True), "abc", "</think>abc"),
        (budget(9, TOKENS, inside=True), "abc</think>def", "abc</think>def"),
        (budget(3, TOKENS, inside=True), "abc</think>def", "abc</think>def"),
        (budget(2, TOKENS), "<think>abc", "<think>ab</think>c"),
        (budget(0, TOKENS), "<think>abc", "<think></think>abc"),
        (budget(2, TOKENS), "no thinking at all", "no thinking at all"),
        (budget(3, TOKENS), "<think>ab</think>c<think>de", "<think>ab</think>c<think>d</think>e"),
        (budget(3, SPELT, inside=True), "abcdef", "abc))def"),
        (budget(3, SPELT), " ((abcdef", " ((abc))def"),
        (budget(3, SPELT), "[[abcdef", "[[abc]]def"),
        (budget(3, SPELT, inside=True), "ab)cdef", "ab))cdef"),
        (budget(9, SPELT, inside=True), "ab))((cd", "ab))((cd"),
        (budget(4, SPELT, inside=True), "ab))((cde", "ab))((c))de"),
        (budget(0, SPELT), "text ((is text", "text ((is text"),
        (budget(1, MIXED), "xa<think>bef", "xa<think>bec</think>df"),
        (budget(2, MIXED), "a<think>becf", "a<think>bec</think>df"),
        (budget(2, MIXED), "<think>bef", "<think>bef"),
    ],
)
def test_the_block_is_closed_when_the_budget_is_spent(compiler, limit, wishes, answer):
    assert answer_text(compiler, Grammar(budget=limit), wishes) == answer


def test_only_the_closing_marker_is_constrained(compiler):
    matcher = compiler.compile(Grammar(budget=budget(2, TOKENS, inside=True))).start()
    seen = []
    for token in spelt("ab</think>c<tool>d"):
        seen.append((matcher.constrains, matcher.forced))
        matcher.consume(token)
    assert seen == [(False, None)] * 2 + [(True, CLOSE)] + [(False, None)] * 3
    assert not matcher.is_complete


@pytest.mark.parametrize(
    ("markers", "close"), [(TOKENS, "</think>"), (SPELT, "))")], ids=["tokens", "spelt"]
)
@pytest.mark.parametrize(
    "body",
    [
        ChoiceGrammar(choices=["yes"]),
        JsonObject(),
        Rules(start=LiteralForm('<tool>{"name": "f"}</tool>')),
    ],
    ids=["choice", "json", "call"],
)
@pytest.mark.parametrize("inside", [True, False])
def test_the_body_follows_the_closed_block(compiler, markers, close, body: Body, inside):
    opens = markers["opens"][0]
    thinking = Thinking(opens=opens, closes=close, inside=inside, optional=not inside)
    grammar = Grammar(body=body, thinking=thinking, budget=budget(4, markers, inside=inside))
    check_grammar(grammar)
    matcher = compiler.compile(grammar).start()
    start = [] if inside else spelt(opens)
    wishes: Iterator[int] = chain(start, ids_of("abcd"), repeat(OPEN if close != "))" else 0))
    answer = text_of(written(matcher, compiler.vocab_size, wishes, most=len(start) + 30))
    assert answer.startswith(("" if inside else opens) + "abcd" + close)
    rest = answer.removeprefix(("" if inside else opens) + "abcd" + close)
    assert rest.strip(), "the body has not begun"


@pytest.mark.parametrize(
    ("thinking", "wishes", "answer"),
    [
        (
            Thinking(closes="</think>", opens="<think>", inside=True),
            "ab</think><think>",
            "ab</think>",
        ),
        (
            Thinking(closes="</think>", opens="<think>"),
            "<think>a</think><think>",
            "<think>a</think>",
        ),
        (
            Thinking(closes="</think>", opens="<think>", optional=True),
            "<think>a</think><think>",
            "<think>a</think>",
        ),
    ],
)
def test_a_body_with_a_budget_follows_at_most_one_block(compiler, thinking, wishes, answer):
    grammar = Grammar(
        body=ChoiceGrammar(choices=["y"]),
        thinking=thinking,
        budget=budget(9, TOKENS, inside=thinking.inside),
    )
    text = answer_text(compiler, grammar, wishes)
    assert text.startswith(answer)
    assert "<think>" not in text.removeprefix(answer)
    assert text.endswith("y")


def test_a_character_is_completed_before_the_block_is_closed() -> None:
    tokenizer, compiler = tokenizer_of("qwen3"), Compiler(family_card("qwen3"))
    smile = tokenizer.encode("𓀀", False)
    assert len(smile) > 1, "a character of several tokens"
    limit = ThinkingBudget(most=1, closes=["</think>"], opens=["<think>"], inside=True)
    thinking = Thinking(opens="<think>", closes="</think>", inside=True)
    for grammar in (
        Grammar(budget=limit),
        Grammar(body=ChoiceGrammar(choices=["yes"]), thinking=thinking, budget=limit),
    ):
        matcher = compiler.compile(grammar).start()
        answer = written(matcher, compiler.vocab_size, [*smile, *smile], most=len(smile) + 1)
        assert answer == [*smile, tokenizer.token_id("</think>")]


@pytest.mark.parametrize("text", ["a", "é", "語", "𓀀", "", "ab\xff"])
def test_a_text_is_cut_if_its_last_character_is_incomplete(text: str) -> None:
    data = text.encode()
    assert not is_cut(data)
    last = text[-1:].encode()
    for size in range(1, len(last)):
        assert is_cut(data[: len(data) - len(last) + size])


def test_invalid_bytes_do_not_delay_the_closing_marker_forever() -> None:
    """The model writes only first bytes of characters."""
    tokenizer, compiler = tokenizer_of("qwen3"), Compiler(family_card("qwen3"))
    lead = tokenizer.token_id("ð") or 0  # the byte F0, in the alphabet of bytes
    limit = ThinkingBudget(most=5, closes=["</think>"], inside=True)
    matcher = compiler.compile(Grammar(budget=limit)).start()
    answer = written(matcher, compiler.vocab_size, repeat(lead), most=12)
    assert answer[9] == tokenizer.token_id("</think>")
    assert set(answer[:9]) == {lead}


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(), "neither a body nor a thinking budget"),
        (Grammar(budget=budget(1, TOKENS), before="x"), "which need one"),
        (Grammar(budget=budget(-1, TOKENS)), "budget of -1"),
        (Grammar(budget=ThinkingBudget(most=1, closes=["x"])), "opening marker"),
        (Grammar(budget=ThinkingBudget(most=1, closes=[], opens=["x"])), "closing marker"),
        (Grammar(budget=ThinkingBudget(most=1, closes=["x", ""], inside=True)), "closing marker"),
        (
            Grammar(budget=ThinkingBudget(most=1, closes=["x"] * 33, inside=True)),
            "33 thinking markers",
        ),
        (Grammar(budget=ThinkingBudget(most=1, closes=["x" * 257], inside=True)), "257 char"),
    ],
)
def test_an_invalid_thinking_budget_is_refused(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_grammar(grammar)


# ---- in the engine, with the markers "(" and ")"
def answered(bench: Bench, prompts: int, **params: Any) -> list[str]:
    grammar = Grammar(budget=ThinkingBudget(most=7, opens=["("], closes=[")"], inside=True))
    numbers = [bench.add([n], grammar=grammar, **params) for n in range(1, prompts + 1)]
    while bench.jobs:
        bench.compile()
    bench.run()
    return [text_of(bench.tokens(number)) for number in numbers]


def test_every_answer_keeps_its_budget_and_is_free_after_it() -> None:
    answers = answered(Bench(), 30, max_tokens=60, ignore_eos=True)
    thoughts = [answer.partition(")") for answer in answers]
    assert all(close and len(thought) <= 7 for thought, close, _ in thoughts)
    assert sum(len(thought) == 7 for thought, _, _ in thoughts) > 20
    assert len({rest for _, _, rest in thoughts}) == 30


def test_a_preempted_request_keeps_its_place_in_the_budget() -> None:
    alone = answered(Bench(), 12, max_tokens=40)
    crowded = Bench(num_blocks=25, max_slots=12)
    assert answered(crowded, 12, max_tokens=40) == alone
    assert crowded.engine.stats().num_preemptions > 0


def test_only_rows_at_the_end_of_their_budget_are_masked() -> None:
    bench = Bench()
    answered(bench, 1, max_tokens=40)
    assert sum(plan.masked is not None for plan in bench.plans) == 1


# ---- the budgets that the gateway requests
CONTROL_TOKENS = "{# <|channel|>analysis<|message|> <|tool_calls_section_begin|> #}"
"""A template with the control tokens that the formats below require."""


def budget_for(
    reasoning: str, prompt: str, most: int = 5, tools: str = "none", **kwargs: Any
) -> Any:
    card = msgspec.structs.replace(thinking_card(), chat_template=CONTROL_TOKENS)
    output_format = ModelOutputFormat(card, Tokenizer(card), tools, reasoning)
    return output_format.answer_start(prompt, kwargs, calls=tools != "none").budget("field", most)


@pytest.mark.parametrize(
    ("reasoning", "prompt", "limit"),
    [
        ("qwen3", "<assistant>", (["<think>"], "</think>", False)),
        ("qwen3", "<assistant><think>\n", (["<think>"], "</think>", True)),
        ("qwen3", "<assistant><think>\n\n</think>\n\n", (["<think>"], "</think>", False)),
        ("deepseek_r1", "<assistant>", (["<think>"], "</think>", True)),
        ("seed_oss", "<assistant>", (["<seed:think>"], "</seed:think>", False)),
        (
            "k2_horizon",
            "<assistant><ifm|think_fast>",
            (["<ifm|think_fast>", "<ifm|think>", "<ifm|think_faster>"], "</ifm|think_fast>", True),
        ),
        ("openai_gptoss", "<|start|>", (["<|channel|>analysis<|message|>"], "<|end|>", False)),
    ],
)
def test_the_budget_has_the_markers_of_the_reasoning_format(reasoning, prompt, limit):
    made = budget_for(reasoning, prompt)
    check_grammar(Grammar(budget=made))
    assert (made.opens, made.closes[0], made.inside) == limit
    assert made.most == 5


def test_a_call_marker_ends_thinking_only_in_formats_that_declare_it() -> None:
    assert "<|tool_calls_section_begin|>" in budget_for("kimi_k2", "", tools="kimi_k2").closes
    assert "<tool_call>" not in budget_for("qwen3", "", tools="hermes").closes


def test_there_is_no_budget_without_thinking() -> None:
    assert budget_for("deepseek_v3", "<assistant>", thinking=False) is None


@pytest.mark.parametrize(
    ("reasoning", "reason"),
    [
        ("none", "the server has no reasoning format for this model"),
        ("minimax_m2_append_think", "this model's reasoning format has no closing marker"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused_with_the_reason(
    reasoning: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        budget_for(reasoning, "<assistant>")
    assert caught.value.param == "field"
    assert str(caught.value) == (
        f"field: thinking cannot be limited, because {reason}; leave the field out, or "
        "restart the server with --reasoning-format"
    )
