"""The answers that each grammar admits, token by token, with one token per character."""

from __future__ import annotations

import json
from functools import partial

import pytest

from engine_core.grammar.compiler import Compiler
from engine_core.grammar.lark import literal, speller
from engine_core.grammar.markers import added_tokens, is_marker, with_markers_special
from engine_core.grammar.masks import compute_masks
from engine_core.grammar.probe import GrammarProbe
from engine_core.grammar.source import MAX_BLANKS
from protocol.engine.grammar import (
    Body,
    ChoiceGrammar,
    Either,
    Gbnf,
    Grammar,
    GrammarRule,
    Json,
    JsonObject,
    JsonSchema,
    Lark,
    LiteralForm,
    Pattern,
    Regex,
    Repeat,
    Rules,
    Sequence,
    Structural,
    Tag,
    Thinking,
    Until,
    check_grammar,
)
from protocol.wire.errors import InvalidRequest
from tests.support.cpu_time import cpu_s
from tests.support.grammars import (
    MARKERS,
    ids_of,
    possible,
    read,
    schema,
    signs_card,
    signs_tokenizer,
)

THINK, END_THINK = MARKERS["<think>"], MARKERS["</think>"]
TOOL, END_TOOL, CALL = MARKERS["<tool>"], MARKERS["</tool>"], MARKERS["[CALL]"]
NUMBER = schema(x={"type": "integer"})


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(signs_card())


@pytest.mark.parametrize(
    ("body", "answer", "left"),
    [
        (JsonSchema(text=NUMBER), '{"x":12}', "$$"),
        (JsonSchema(text=NUMBER), '{ "x": 12\n}', "$$"),
        (JsonSchema(text=NUMBER), '{"y":12}', 'y":12}'),
        (JsonSchema(text=NUMBER), '{"x":"12"}', '"12"}'),
        (JsonSchema(text=NUMBER), ' {"x":12}', ' {"x":12}'),
        (JsonSchema(text='{"enum":["a","b"]}'), '"b"', "$$"),
        (JsonSchema(text='{"type":"integer"}'), "12", "$"),
        (JsonObject(), '{"any":[1,{"thing":null}]}', "$$"),
        (JsonObject(), "[1]", "[1]"),
        (Regex(pattern=r"a/b\d{2}"), "a/b12", "$$"),
        (Regex(pattern=r"a/b\d{2}"), "a/b1x", "x"),
        (Regex(pattern="^[ab]+$"), "abba", "$"),
        (Regex(pattern="yes|no"), "no", "$$"),
        (ChoiceGrammar(choices=["yes", "no", 'not "x"\n']), 'not "x"\n', "$$"),
        (ChoiceGrammar(choices=["yes", "no", "not"]), "no", "$"),
        (ChoiceGrammar(choices=["yes", "no"]), "maybe", "maybe"),
        (ChoiceGrammar(choices=["", "x"]), "", "$"),
        (Lark(text='start: "a"+ b\nb: "[" b "]" | "."'), "aa[[.]]", "$$"),
        (Lark(text='start: "a"+ b\nb: "[" b "]" | "."'), "aa[[.],", ","),
        (Lark(text='start: "f" @args', schemas={"args": NUMBER}), 'f{"x":1}', "$$"),
        (Gbnf(text='root ::= "yes" | "no" [0-9]+'), "no12", "$"),
    ],
)
def test_a_body_admits_only_its_answers(compiler, body, answer, left):
    assert read(compiler, body, answer) == left


def test_blanks_between_items_are_bounded(compiler):
    for blanks, left in ((MAX_BLANKS, "$$"), (MAX_BLANKS + 1, ' "x":1}')):
        answer = "{" + " " * blanks + '"x":1}'
        assert read(compiler, JsonSchema(text=NUMBER), answer) == left


def test_alternatives_may_have_a_common_prefix(compiler):
    calls = {name: schema(name={"const": name}, x={"type": kind}) for name, kind in KINDS.items()}
    body = Lark(text="start: @add | @say", schemas=calls)
    assert read(compiler, body, '{"name":"say","x":"y"}') == "$$"
    assert read(compiler, body, '{ "name": "add", "x": 1}') == "$$"
    assert read(compiler, body, '{"name":"add","x":"y"}') == '"y"}'


KINDS = {"add": "integer", "say": "string"}


# ---- markers
def test_a_marker_is_possible_only_if_the_grammar_names_it(compiler):
    by_id = Lark(text=f"start: <[{TOOL}]> @args </tool>", schemas={"args": NUMBER})
    assert read(compiler, by_id, TOOL, '{"x":1}', END_TOOL) == "$$"
    assert read(compiler, by_id, "<tool>") == "<tool>"
    for marker in (THINK, TOOL, CALL):
        assert read(compiler, JsonObject(), '{"x":"', marker) != ""
        assert read(compiler, Regex(pattern="(?s:.*)"), "so ", marker) != "$"
    assert read(compiler, Regex(pattern="(?s:.*)"), MARKERS["word"], " and <tool>") == "$"


def test_only_markers_that_llguidance_misses_are_made_special():
    before = {token.content: token.special for token in added_tokens(signs_tokenizer())}
    made = with_markers_special(signs_tokenizer())
    after = {token.content: token.special for token in added_tokens(made)}
    assert {name for name in before if before[name] != after[name]} == {"[CALL]"}
    assert with_markers_special(made) is made
    assert json.loads(made)["model"] == json.loads(signs_tokenizer())["model"]


@pytest.mark.parametrize(
    ("text", "yes"),
    [
        ("[CALL]", 1),
        ("<|x|>", 1),
        ("|z|", 1),
        ("  ", 0),
        ("word", 0),
        ("--", 0),
        ("A>", 0),
        ("", 0),
    ],
)
def test_a_marker_is_a_word_between_punctuation(text, yes):
    assert is_marker(text) == bool(yes)


def test_special_characters_are_escaped_and_markers_written_by_id():
    spell = speller({"<a>": 7, "<a><b>": 8})
    assert spell("x<a>/<a><b>") == r"/x/ <[7]> /\x{2f}/ <[8]>"
    assert spell("") == literal("") == ""
    assert speller({})('"\n') == r"/\x{22}\x{a}/"


# ---- thinking
YES = ChoiceGrammar(choices=["yes"])
BLOCK = Thinking(opens="<think>", closes="</think>")
REST = Thinking(opens="<think>", closes="</think>", inside=True)
MAYBE = Thinking(opens="<think>", closes="</think>", optional=True)
SPELT = Thinking(opens="{{", closes="}}")
MIXED = Thinking(closes="</think>final<tool>", inside=True)
AFTER = Thinking(closes="end</think>", inside=True)


@pytest.mark.parametrize(
    ("thinking", "answer", "left"),
    [
        (BLOCK, ["yes"], "yes"),
        (BLOCK, [THINK, "yes or\nno", END_THINK, "yes"], "$$"),
        (BLOCK, [THINK, END_THINK, "\n\nyes"], "$$"),
        (BLOCK, [THINK, "hm", END_THINK, "\n", THINK, "oh", END_THINK, "yes"], "$$"),
        (BLOCK, [THINK, "hm", END_THINK, "no"], "no"),
        (BLOCK, [THINK, "hm</think>yes", 0], ""),
        (BLOCK, [THINK, THINK], "<think>"),
        (MAYBE, ["yes"], "$$"),
        (MAYBE, ["\nyes"], "\nyes"),
        (MAYBE, [THINK, "hm", END_THINK, "yes"], "$$"),
        (REST, ["hm", END_THINK, "yes"], "$$"),
        (REST, [END_THINK, "\n\nyes"], "$$"),
        (REST, ["hm", END_THINK, "\n", THINK, "oh", END_THINK, "\nyes"], "$$"),
        (REST, [THINK], "<think>"),
        (SPELT, ["{{ yes } or no }}yes"], "$$"),
        (SPELT, ["{{ yes }}no"], "no"),
        (MIXED, ["hm", END_THINK, "final", TOOL, "yes"], "$$"),
        (MIXED, ["hm", END_THINK, "yes"], "yes"),
        (AFTER, ["the end", END_THINK, "yes"], "$$"),
        (AFTER, ["ends tend to end", END_THINK, "yes"], "$$"),
        (AFTER, ["the en", END_THINK, "yes"], "</think>yes"),
    ],
)
def test_the_body_begins_exactly_where_thinking_ends(compiler, thinking, answer, left):
    assert read(compiler, YES, *answer, thinking=thinking) == left


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (JsonSchema(text=NUMBER), []),
        (Regex(pattern=r'\{"x":1\}'), []),
        (Lark(text=f"start: <[{TOOL}]> @args", schemas={"args": NUMBER}), [TOOL]),
    ],
)
def test_any_body_may_follow_thinking(compiler, body, answer):
    thought = [THINK, "hm", END_THINK, "\n\n", *answer, '{"x":1}']
    assert read(compiler, body, *thought, thinking=BLOCK) == "$$"


# ---- tags in free text
TAGS = [
    Tag(begin="<f=a>", schema=NUMBER, end="</f>"),
    Tag(begin="<f=b>", schema="{}", end="</f>"),
    Tag(begin="<tool>c\n", schema=NUMBER, end="\n</tool>"),
    Tag(begin="call [CALL]", schema=NUMBER, end="."),
]
TRIGGERS = ["<f=", "<tool>", "call [CALL]"]


@pytest.mark.parametrize(
    ("options", "answer", "left"),
    [
        ({}, ["just text"], "$"),
        ({}, ['a <f <f=a>{"x":1}</f> and <f=b>[2]</f>.'], "$"),
        ({}, [TOOL, 'c\n{"x":1}\n', END_TOOL, " bye"], "$"),
        ({}, ["<f=c>"], "c>"),
        ({}, [TOOL, "d"], "d"),
        ({}, ["a call: call ", CALL, '{"x":1}. I call '], "$"),
        ({}, ["<f=a>[2]"], "[2]"),
        ({"at_least_one": True}, ["just text", 0], ""),
        ({"at_least_one": True}, ['so <f=a>{"x":1}</f> ok'], "$"),
        ({"only_one": True}, ["just text"], "$"),
        ({"only_one": True, "at_least_one": True}, ['so <f=a>{"x":1}</f>'], "$$"),
    ],
)
def test_a_trigger_in_free_text_must_become_one_of_its_tags(compiler, options, answer, left):
    body = Structural(triggers=TRIGGERS, tags=TAGS, **options)
    check_grammar(Grammar(body=body))
    assert read(compiler, body, *answer) == left


# ---- rules
NESTED = Rules(
    start=GrammarRule("list"),
    rules={
        "list": Sequence([LiteralForm("["), Repeat(GrammarRule("item")), LiteralForm("]")]),
        "item": Either([GrammarRule("list"), Json("number"), LiteralForm("-")]),
    },
    schemas={"number": NUMBER},
)
VALUE = Until("</v>", "[a-c]{2,3}")


@pytest.mark.parametrize(
    ("start", "answer", "left"),
    [
        (LiteralForm("a.b"), ["a.b"], "$$"),
        (LiteralForm("a.b"), ["axb"], "xb"),
        (LiteralForm("say <tool>x"), ["say ", TOOL, "x"], "$$"),
        (LiteralForm("say <tool>x"), ["say <tool>x"], "<tool>x"),
        (Sequence([LiteralForm(""), LiteralForm("a"), Sequence([])]), ["a"], "$$"),
        (Pattern("a+|b"), ["aaa"], "$"),
        (Sequence([Pattern("[a-z/]+"), LiteralForm("!")]), ["a/b!"], "$$"),
        (Until("<end>"), ["a <en <end>"], "$$"),
        (Sequence([Until("a<tool>b"), LiteralForm("x")]), ["a <tool>aa", TOOL, "bx"], "$$"),
        (Until("ab<tool>", "[bc]*"), ["abab", TOOL], "ab<tool>"),
        (Until("ab<tool>", "a?[bc]*"), ["abab", TOOL], "$$"),
        (Sequence([Until("</tool>!"), LiteralForm("x")]), ["a </tool>", END_TOOL, "!x"], "$$"),
        (Sequence([VALUE, VALUE]), ["ab</v>abc</v>"], "$$"),
        (Sequence([VALUE, VALUE]), ["ab</v>abcd</v>"], "d</v>"),
        (Either([LiteralForm("yes"), LiteralForm("yet"), LiteralForm("no")]), ["yet"], "$$"),
        (Repeat(LiteralForm("ab"), 1), ["abab"], "$"),
        (Repeat(LiteralForm("ab"), 1), ["a"], ""),
        (Repeat(LiteralForm("ab"), 2, 3), ["ababab"], "$$"),
        (Repeat(LiteralForm("ab"), 2, None), ["ababa", "b"], "$"),
        (Sequence([Repeat(LiteralForm("a"), 0, 1), LiteralForm("b")]), ["b"], "$$"),
    ],
)
def test_each_rule_form_admits_its_texts(compiler, start, answer, left):
    body = Rules(start=start)
    check_grammar(Grammar(body=body))
    assert read(compiler, body, *answer) == left


def test_rules_refer_to_themselves_and_to_schemas(compiler):
    assert read(compiler, NESTED, '[[]-{"x":1}[-]]') == "$$"
    assert read(compiler, NESTED, '[[]{"x":"1"}') == '"1"}'


def test_fixed_text_surrounds_any_body_after_the_thinking(compiler):
    frame = {"thinking": MAYBE, "before": "<tool>final:", "after": "\n</tool>"}
    for body in (YES, Rules(start=LiteralForm("yes")), Lark(text='start: "yes"')):
        answer: list[str | int] = [TOOL, "final:yes\n", END_TOOL]
        assert read(compiler, body, *answer, **frame) == "$$"
        assert read(compiler, body, THINK, "hm", END_THINK, *answer, **frame) == "$$"
        assert read(compiler, body, "yes", **frame) == "yes"
    assert read(compiler, YES, "a yes", before="a ") == "$$"


# ---- refusals
def nested(depth: int) -> Sequence:
    form = Sequence([])
    for _ in range(depth):
        form = Sequence([form])
    return form


def wide(num: int) -> str:
    """Return the schema of an object with `num` optional properties."""
    properties = {f"name_{n}": {"type": "string"} for n in range(num)}
    return json.dumps({"type": "object", "properties": properties})


def chain(length: int) -> str:
    """Return a schema with a chain of `length` references."""
    links = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(length)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "string"}}})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (JsonSchema(text="["), "not a JSON object"),
        (JsonSchema(text="true"), "not a JSON object"),
        (JsonSchema(text='{"a":' * 60_000), "not a JSON object"),
        (JsonSchema(text='{"type":"object","not":{},"if":{}}'), '"if", "not"'),
        (JsonSchema(text='{"type":"array","uniqueItems":true}'), "uniqueItems"),
        (JsonSchema(text='{"type":"string","format":"colour"}'), "Unknown format: colour"),
        (JsonSchema(text='{"type":"string","pattern":"(?<=x)y"}'), "look-behind"),
        (JsonSchema(text='{"x-guidance":{"lenient":true}}'), "x-guidance"),
        (JsonSchema(text='{"properties":{"a":{"x-guidance":1,"not":{}}}}'), '"not"'),
        (JsonSchema(text='{"$ref":"#"}'), "no text satisfies it"),
        (JsonSchema(text='{"$ref":"https://example.com/s.json"}'), "example.com"),
        (JsonSchema(text='{"enum":[]}'), "Unsatisfiable"),
        (JsonSchema(text=wide(2000)), "max is"),
        (JsonSchema(text=schema(a=json.loads(wide(2000)))), "too large to be enforced .*max is"),
        (
            JsonSchema(text=schema(s={"type": "string"}, a=json.loads(wide(2000)))),
            "too large to be enforced",
        ),
        (
            JsonSchema(text=schema(a={"type": "array", "items": json.loads(wide(2000))})),
            "too large to be enforced",
        ),
        (JsonSchema(text=schema(a={"$ref": "#/properties/a"})), "cannot be completed"),
        (Regex(pattern="(?<=x)*"), "look-behind"),
        (Regex(pattern="(" * 30_000 + ")" * 30_000), "invalid regex"),
        (Regex(pattern="["), "invalid regex"),
        (Lark(text="start: start"), "no text satisfies it"),
        (Lark(text="start: nowhere"), "nowhere"),
        (Lark(text="start: <nowhere>"), "nowhere"),
        (Lark(text="start: " + "(" * 20_000), "nested"),
        (Lark(text="start: @other"), "other"),
        (Lark(text='start: "a" "'), "lexer error"),
        (Lark(text='start: "a"', schemas={"x": "["}), "not a JSON object"),
        (Gbnf(text="root = x"), "GBNF"),
        (Gbnf(text="root ::= " + "(" * 20_000), "nested"),
    ],
)
def test_a_body_that_cannot_be_enforced_is_refused_with_the_reason(
    compiler, body, reason, monkeypatch
):
    # On a busy machine, the probe's walks may need more than their usual time limit.
    monkeypatch.setattr("engine_core.grammar.probe.MAX_S", 60.0)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiler.compile(Grammar(body=body))
    assert caught.value.param == "grammar"
    assert len(caught.value.message) < 700


@pytest.mark.parametrize("thinking", [BLOCK, REST, MAYBE, SPELT], ids=str)
@pytest.mark.parametrize("body", [JsonSchema(text='{"$ref":"#"}'), Lark(text="start: start")])
def test_a_body_after_thinking_is_checked_by_itself(compiler, thinking, body):
    with pytest.raises(InvalidRequest, match="no text satisfies it"):
        compiler.compile(Grammar(body=body, thinking=thinking))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(body=JsonSchema(text=" " * (600 << 10))), "characters long"),
        (Grammar(body=Regex(pattern="")), "from 1"),
        (Grammar(body=Regex(pattern="a" * (65 << 10))), "characters"),
        (Grammar(body=ChoiceGrammar(choices=[])), "choices"),
        (Grammar(body=ChoiceGrammar(choices=["a"] * 5000)), "choices"),
        (Grammar(body=Lark(text="s", schemas={str(n): "" for n in range(1025)})), "schemas"),
        (Grammar(body=Structural(triggers=[], tags=TAGS)), "triggers"),
        (Grammar(body=Structural(triggers=["<f="], tags=TAGS)), "no trigger for the tag '<tool>"),
        (Grammar(body=Structural(triggers=["<f=", "<g"], tags=TAGS[:1])), "the trigger '<g'"),
        (Grammar(body=Structural(triggers=[""], tags=TAGS[:1])), "empty trigger"),
        (Grammar(body=Rules(start=Json("a"))), "no schema 'a'"),
        (Grammar(body=Rules(start=Sequence([GrammarRule("a")]))), "no rule 'a'"),
        (Grammar(body=Rules(start=Repeat(Until("")))), "empty end"),
        (Grammar(body=Rules(start=Either([]))), "without options"),
        (Grammar(body=Rules(start=Repeat(LiteralForm("a"), 2, 1))), "from 2 to 1"),
        (Grammar(body=Rules(start=nested(100))), "nested more than 64 deep"),
        (Grammar(body=Rules(start=Sequence([LiteralForm("")] * 20_000))), "20,001 forms"),
        (Grammar(body=Rules(start=LiteralForm("a" * (600 << 10)))), "characters long"),
        (Grammar(body=Rules(start=LiteralForm("a" * 17_000))), "a literal of 17,000 characters"),
        (Grammar(body=Rules(start=Sequence([LiteralForm("a" * 9_000)] * 9))), "81,000 characters"),
        (Grammar(body=JsonObject(), before="a" * 17_000), r"\(before\)"),
        (Grammar(body=JsonObject(), after="a" * 17_000), r"\(after\)"),
        (Grammar(body=ChoiceGrammar(choices=["a", "a" * 17_000])), r"\(choices\[1\]\)"),
        (Grammar(body=Structural(triggers=["a" * 17_000], tags=TAGS)), r"\(triggers\[0\]\)"),
        (Grammar(body=JsonObject(), thinking=Thinking(closes="")), "closing marker"),
        (Grammar(body=JsonObject(), thinking=Thinking(closes="x")), "opening marker"),
    ],
)
def test_bounds_are_checked_before_anything_is_compiled(grammar, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        check_grammar(grammar)
    assert caught.value.param == "grammar"


def test_a_long_literal_of_a_schema_is_refused_by_the_compiler(compiler):
    """Clients without HTTP send schemas that no gateway has checked."""
    text = json.dumps({"type": "object", "properties": {"a": {"const": "x" * 20_000}}})
    for body in (JsonSchema(text=text), Lark(text="start: @s", schemas={"s": text})):
        with pytest.raises(InvalidRequest, match=r"schema\.properties\.a\.const.*20,000") as caught:
            compiler.compile(Grammar(body=body))
        assert caught.value.param == "grammar"


DOUBLING = "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(12))


@pytest.mark.parametrize(
    "body",
    [
        Lark(text=f'start: r0\n{DOUBLING}r12: "{"x" * 40}"'),
        Lark(text=f"start: [r0] | r0?\n{DOUBLING}r12: /(ab|cd|x{{40}})+?/"),
        Lark(text='start: "a" | (("b" | B{4000}))?\nB: /x{40}/'),
        Lark(text='start: %json {"const": ":\\n"} (a ~ 9)\na: "b" ~ 20000..30000'),
        Gbnf(text='root ::= ("a" | r{900})\nr ::= "x" s{200}\ns ::= [a] | [b] "c"'),
        Rules(start=Repeat(LiteralForm("x" * 300), 500)),
        Rules(
            start=GrammarRule("a"),
            rules={
                "a": Repeat(GrammarRule("b"), 50),
                "b": Repeat(GrammarRule("c"), 50),
                "c": LiteralForm("x" * 60),
            },
        ),
    ],
)
def test_a_grammar_that_demands_a_huge_text_is_refused(compiler, body):
    with pytest.raises(InvalidRequest, match="demands a text of more than 131,072 characters"):
        compiler.compile(Grammar(body=body))


def test_alternatives_and_recursion_do_not_count_as_demanded_text(compiler):
    """Each alternative refers twice to the next rule, but the shortest text has one character."""
    rules = "".join(f'r{n}: r{n + 1} r{n + 1} | "x" | r{n} "y"\n' for n in range(30))
    body = Lark(text=f'start: r0\n{rules}r30: "{"z" * 900}"')
    assert read(compiler, body, "x") == "$"


def test_huge_schemas_compile(compiler):
    assert read(compiler, JsonSchema(text=wide(1000)), '{"name_5":"a","name_999":"b"}') == "$$"
    values = [f"value {n}" for n in range(20_000)]
    assert read(compiler, JsonSchema(text=json.dumps({"enum": values})), '"value 19999"') == "$$"
    assert read(compiler, JsonSchema(text=chain(500)), '"a"') == "$$"


def test_matchers_of_one_template_are_independent(compiler):
    template = compiler.compile(Grammar(body=ChoiceGrammar(choices=["ab", "ac"])))
    first, second = template.start(), template.start()
    for token in ids_of("ab"):
        first.consume(token)
    assert (first.is_complete, second.is_complete) == (True, False)
    second.consume(ids_of("b")[0])
    assert second.error is not None
    assert first.error is None
    assert template.start().error is None


def test_a_compiled_grammar_is_fast_from_its_first_token(compiler, monkeypatch):
    """The first mask costs four times as much as the second, so the probe computes it during the
    compilation. The test compares the first mask with that of a compiler without a probe."""
    prepared: list[float] = []
    unprepared: list[float] = []
    for number in range(40):
        grammar = Grammar(body=JsonSchema(text=schema(**{f"x{number}": {"type": "integer"}})))
        with monkeypatch.context() as patch:
            patch.setattr(GrammarProbe, "find_fault", lambda probe, inner: "")
            unprepared.append(first_mask_s(compiler, grammar))
        prepared.append(first_mask_s(compiler, grammar))
    assert min(prepared) < 2.5 / 4 * min(unprepared)


def first_mask_s(compiler: Compiler, grammar: Grammar) -> float:
    matcher = compiler.compile(grammar).start()
    return cpu_s(partial(compute_masks, [matcher], compiler.vocab_size))


def bodies() -> list[Body]:
    return [JsonObject(), YES, Structural(triggers=TRIGGERS, tags=TAGS)]


@pytest.mark.parametrize("body", bodies(), ids=lambda body: type(body).__name__)
def test_every_step_allows_a_token_until_the_answer_is_complete(compiler, body):
    """The walk takes arbitrary allowed tokens and meets no dead end."""
    matcher = compiler.compile(Grammar(body=body, thinking=BLOCK)).start()
    for step in range(300):
        if matcher.is_complete:
            return
        left = sorted(possible(matcher, compiler.vocab_size))
        assert left, "a dead end"
        matcher.consume(left[-1 - step * 7 % len(left)])
        assert matcher.error is None
