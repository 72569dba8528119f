# ruff: noqa: RUF001  (markers are spelt as the vocabularies have them)
"""Calls with one tag for each argument: events do not depend on how the answer is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gateway.formats.event_builder import PARSE_FAILED
from gateway.formats.events import (
    Content,
    Event,
    OutputWarning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
)
from gateway.formats.reasoning import THINK
from gateway.formats.registry import Format
from gateway.formats.xml_parameters import FORMATS
from gateway.formats.xml_parameters_parser import DOUBLED, INNER, UNCLOSED
from tests.support.format_tools import TYPED_TOOLS, arguments_of, parsed_events, plain, tool
from tests.support.formats import (
    Call,
    Fixture,
    FormatRow,
    Sample,
    check_cuts,
    content,
    dumps,
    lexicon,
    lexicon_of_parts,
    reasoning_writer,
)

Writer = Callable[[Sequence[Call], int], str]


def functions(open: str, close: str, newline: str = "\n") -> Writer:
    """Return a writer of `<function=f>` tags that puts every call into a group of its own."""

    def one(call: Call) -> str:
        body = "".join(
            f"<parameter={key}>{newline}{plain(value)}{newline}</parameter>\n"
            for key, value in call.arguments.items()
        )
        return f"{open}\n<function={call.name}>\n{body}</function>\n{close}"

    return lambda calls, before: "\n".join(map(one, calls))


def invokes(
    open: str, close: str, prefix: str = "", attribute: Callable[[Any], str] = lambda value: ""
) -> Writer:
    """Return a writer of `<invoke name="f">` tags that puts all calls into one group."""

    def one(call: Call) -> str:
        body = "".join(
            f'<{prefix}parameter name="{key}"{attribute(value)}>{plain(value)}'
            f"</{prefix}parameter>\n"
            for key, value in call.arguments.items()
        )
        return f'<{prefix}invoke name="{call.name}">\n{body}</{prefix}invoke>'

    return lambda calls, before: f"{open}\n" + "\n".join(map(one, calls)) + f"\n{close}"


def is_string(value: Any) -> str:
    return ' string="true"' if isinstance(value, str) else ' string="false"'


def minicpm5(calls: Sequence[Call], before: int) -> str:
    def written(value: Any) -> str:
        is_wrapped = isinstance(value, str) and any(char in value for char in "<&\n")
        return f"<![CDATA[{value}]]>" if is_wrapped else plain(value)

    def one(call: Call) -> str:
        body = "".join(
            f'<param name="{key}">{written(value)}</param>' for key, value in call.arguments.items()
        )
        return f'<function name="{call.name}">{body}</function>'

    return "".join(map(one, calls))


def step3(calls: Sequence[Call], before: int) -> str:
    inner = invokes("", "", "steptml:")
    body = "\n".join(
        f"<｜tool_call_begin｜>function<｜tool_sep｜>{inner([call], 0).strip()}<｜tool_call_end｜>"
        for call in calls
    )
    return f"<｜tool_calls_begin｜>\n{body}\n<｜tool_calls_end｜>"


def dsml(mark: str, stretch: str) -> Writer:
    return invokes(f"<{mark}{stretch}>", f"</{mark}{stretch}>", mark, is_string)


WRITERS: dict[str, tuple[Writer, tuple[str, ...]]] = {
    "qwen3_coder": (functions("<tool_call>", "</tool_call>"), ("</parameter>", "</tool_call>")),
    "mimo": (functions("<tool_call>", "</tool_call>", ""), ("</parameter>",)),
    "seed_oss": (functions("<seed:tool_call>", "</seed:tool_call>", ""), ("</parameter>",)),
    "minimax_m2": (
        invokes("<minimax:tool_call>", "</minimax:tool_call>"),
        ("</minimax:tool_call>",),
    ),
    "dots": (invokes("<dots_function_call>", "</dots_function_call>"), ("</invoke>",)),
    "minicpm5": (minicpm5, ("</param>",)),
    "deepseek_v32": (dsml("｜DSML｜", "function_calls"), ("</｜DSML｜parameter>",)),
    "deepseek_v4": (dsml("｜DSML｜", "tool_calls"), ("</｜DSML｜tool_calls>",)),
    "deepseek_v41": (dsml("｜DSML｜ ", "calls"), ("</｜DSML｜ invoke>",)),
    "step3": (step3, ("</steptml:parameter>",)),
}


def sample(name: str) -> Sample:
    write, tags = WRITERS[name]
    syntax = FORMATS[name]
    return Sample(
        name,
        Format(syntax, THINK),
        write,
        think=reasoning_writer(THINK),
        markers=(*syntax.open, *syntax.close, *THINK.markers(), *syntax.skip[:1], *syntax.skip[2:]),
        parts=("｜DSML｜",) if "DSML" in syntax.call_open else (),
        tags=tags,
        trims=syntax.trim == "blanks",
        tools=TYPED_TOOLS,
    )


SAMPLES = [sample(name) for name in WRITERS]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=[s.name for s in SAMPLES])


def say(name: str, text: str, tools: Any = TYPED_TOOLS, tokens: bool = True) -> list[Any]:
    return parsed_events(sample(name), text, tools=tools, tokens=tokens)


def qwen(body: str) -> str:
    return f"<tool_call>\n<function=types>\n{body}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("i", "42", 42),
        ("i", "forty-two", "forty-two"),
        ("i", "007", 7),
        ("b", "True", True),
        ("b", "maybe", "maybe"),
        ("l", "[1, [2]]", [1, [2]]),
        ("l", "['a', None]", ["a", None]),
        ("l", "[1, ", "[1, "),
        ("z", "{not json", "{not json"),
        ("z", "12", "12"),
        ("unheard_of", "12", "12"),
    ],
)
def test_a_value_has_the_type_its_schema_asks_for(key: str, written: str, meant: Any) -> None:
    assert arguments_of(say("qwen3_coder", qwen(parameter(key, written)))) == [{key: meant}]


def test_null_is_null_only_where_the_schema_allows_it_and_nothing_else_is_written() -> None:
    for written, meant in (("null", None), ("nullable", "nullable"), ("nul", "nul"), ("", "")):
        text = (
            f"<tool_call><function=now><parameter=tz>{written}</parameter></function></tool_call>"
        )
        assert arguments_of(say("qwen3_coder", text)) == [{"tz": meant}]
    assert arguments_of(say("qwen3_coder", qwen(parameter("z", "null")))) == [{"z": "null"}]


def test_one_newline_on_each_side_of_a_value_is_markup_and_the_others_are_not() -> None:
    text = qwen("<parameter=z>\n\n a \n\n</parameter>\n")
    assert arguments_of(say("qwen3_coder", text)) == [{"z": "\n a \n"}]
    assert arguments_of(say("mimo", text)) == [{"z": "\n\n a \n\n"}]
    assert arguments_of(say("dots", DOTS.format("\n\n a \n\n"))) == [{"z": "a"}]


@pytest.mark.parametrize("name", ["minimax_m2", "seed_oss", "step3"])
def test_a_string_whose_template_writes_no_newlines_around_it_keeps_its_own(name: str) -> None:
    write, _ = WRITERS[name]
    for value in ("\na\n", "a\n", "\n", " a ", "\n\n"):
        assert arguments_of(say(name, write([Call("types", {"z": value})], 0))) == [{"z": value}]


DOTS = (
    '<dots_function_call><invoke name="types"><parameter name="z">{}</parameter></invoke>'
    "</dots_function_call>"
)


def test_an_attribute_marks_whether_a_value_is_a_string() -> None:
    def call(says: str, value: str) -> str:
        mark = "｜DSML｜"
        return (
            f'<{mark}function_calls><{mark}invoke name="types"><{mark}parameter name="i" '
            f'string="{says}">{value}</{mark}parameter></{mark}invoke></{mark}function_calls>'
        )

    assert arguments_of(say("deepseek_v32", call("true", "42"))) == [{"i": "42"}]
    assert arguments_of(say("deepseek_v32", call("false", "42"))) == [{"i": 42}]
    assert arguments_of(say("deepseek_v32", call("false", "{oops"))) == [{"i": "{oops"}]


def test_a_value_without_its_own_end_ends_with_the_call() -> None:
    text = "<tool_call><function=types><parameter=z>a</function></tool_call>"
    assert arguments_of(say("qwen3_coder", text)) == [{"z": "a"}]
    token = "<tool_call><function=types><parameter=z>a</tool_call>"
    assert arguments_of(say("qwen3_coder", token)) == [{"z": "a"}]


def test_a_value_that_writes_a_call_is_text_as_long_as_its_tags_do_not_follow_each_other() -> None:
    inner = "<function=f><parameter=k>v</parameter>; </function>. <tool>"
    assert arguments_of(say("qwen3_coder", qwen(parameter("z", inner)))) == [{"z": inner}]


def test_a_call_without_the_stretch_around_it_is_one_if_its_tool_is_declared() -> None:
    bare = "Now:\n<function=now>\n</function>\n</tool_call>"
    assert say("qwen3_coder", bare)[:3] == [Content("Now:"), ToolCall(0, "id", "now"), NO_ARGUMENTS]
    other = "Use <function=whatever> for it"
    assert content(say("qwen3_coder", other)) == other


NO_ARGUMENTS = ToolArguments(0, "{}")


def test_a_call_of_an_unknown_tool_is_emitted() -> None:
    events = say("minimax_m2", MINIMAX, tools=(tool("g"),))
    assert [type(event) for event in events] == [
        ToolCall,
        OutputWarning,
        ToolArguments,
        ToolCallEnd,
    ]


MINIMAX = '<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>'


# ---- values with tags of calls
INNER_CALL = (
    "<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n<parameter=l>\nw\n</parameter>\n"
    "</function>\n</tool_call>"
)
WHOLE_VALUES = {
    "a group's end": "see </tool_call> for it",
    "a group's end before the value's": "see </tool_call>",
    "closing tags and text": "a </parameter> b </function> c",
    "two group's ends": "</tool_call></tool_call>!",
    "groups of JSON": "<tool_call>\n{}\n</tool_call>\n<tool_call>\n{}\n</tool_call>",
    "a whole call": f"Write:\n{INNER_CALL}",
    "two whole calls": f"{INNER_CALL}\n{INNER_CALL}",
    "a whole call and text": f"{INNER_CALL}\nor so",
    "a mention of a call's tag": "Use <function=f> for it.",
    "an argument without a call": "<parameter=k>\nv\n</parameter>",
    "a closed tag without a call": "<parameter=k>\nv\n</parameter> is one",
}
"""Values whose tags have no other meaning than text."""


@pytest.mark.parametrize("value", WHOLE_VALUES.values(), ids=WHOLE_VALUES)
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "spelt"])
def test_a_value_with_tags_of_calls_is_whole_and_the_cut_does_not_matter(
    value: str, tokens: bool
) -> None:
    second = parameter("i", "7")
    case = answer_with(qwen(parameter("z", value) + second) + "\nDone.", {"z": value, "i": 7})
    words = lexicon(QWEN, tokens=tokens)
    row = FormatRow("qwen3_coder (tags in values)")
    check_cuts(row, QWEN, case, words)
    assert not row.differences, row.first


QWEN = sample("qwen3_coder")


def answer_with(text: str, arguments: dict[str, Any], warned: str = "") -> Fixture:
    """Return an answer of one call with `arguments`, and then "Done." if the text ends with it."""
    events: list[Event] = [
        ToolCall(0, "call_1", "types"),
        ToolArguments(0, dumps(arguments)),
        ToolCallEnd(0),
        *([OutputWarning(PARSE_FAILED, warned)] if warned else []),
        *([Content("Done.")] if text.endswith("Done.") else []),
    ]
    return Fixture("value", text, events)


DOUBTFUL_VALUES = {
    "a doubled closing tag": (qwen(parameter("z", "ls\n</parameter>")), "ls", DOUBLED),
    "two doubled closing tags": (
        "<tool_call><function=types><parameter=z>a</parameter></parameter></parameter>\n"
        "<parameter=i>7</parameter></function></tool_call>",
        "a",
        DOUBLED,
    ),
    "a doubled end of the call": (
        "<tool_call><function=types><parameter=z>a</function></function></tool_call>",
        "a",
        DOUBLED,
    ),
    "no closing tags": ("<tool_call><function=types><parameter=z>a\n</tool_call>", "a", UNCLOSED),
    "an inner call that is not closed": (
        qwen(parameter("z", "<function=f>\n<parameter=k>")),
        "<function=f>\n<parameter=k>",
        INNER,
    ),
}


@pytest.mark.parametrize("name", DOUBTFUL_VALUES)
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "spelt"])
def test_a_value_whose_end_is_doubtful_comes_with_a_warning(name: str, tokens: bool) -> None:
    text, value, warned = DOUBTFUL_VALUES[name]
    more = {"i": 7} if "<parameter=i>" in text else {}
    row = FormatRow("qwen3_coder (doubtful ends)")
    case = answer_with(text, {"z": value, **more}, warned)
    check_cuts(row, QWEN, case, lexicon(QWEN, tokens=tokens))
    assert not row.differences, row.first


def test_a_call_after_a_value_without_closing_tags_is_a_call() -> None:
    open_value = "<tool_call>\n<function=types>\n<parameter=z>\na\n</tool_call>\n"
    events = say("qwen3_coder", open_value + qwen(parameter("z", "b")))
    assert arguments_of(events) == [{"z": "a"}, {"z": "b"}]
    assert [e.message for e in events if isinstance(e, OutputWarning)] == [UNCLOSED]


# ---- DeepSeek's wrappers
DSML = "｜DSML｜"
INVOKE = (
    f'<{DSML}invoke name="now">\n<{DSML}parameter name="tz" string="true">UTC</{DSML}parameter>\n'
    f"</{DSML}invoke>"
)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
@pytest.mark.parametrize("group", ["tool_calls", "function_calls", "calls", ""])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("vocabulary", [lexicon_of_parts, lambda s: lexicon(s, tokens=True)])
def test_calls_in_any_wrapper_of_deepseek_or_in_none_are_calls(
    name: str, group: str, closed: bool, vocabulary: Callable[[Sample], Any]
) -> None:
    opened = f"<{DSML}{group}>\n" if group else ""
    text = f"Now:\n\n{opened}{INVOKE}\n{INVOKE}" + f"\n</{DSML}{group}>" * (closed and bool(group))
    case = Fixture(
        "wrapper",
        text,
        [
            Content("Now:"),
            *(event for n in range(2) for event in call_events(n, "now", {"tz": "UTC"})),
        ],
    )
    row = FormatRow(f"{name} (other wrappers)")
    check_cuts(row, sample(name), case, vocabulary(sample(name)))
    assert not row.differences, row.first


def call_events(index: int, name: str, arguments: dict[str, Any]) -> list[Event]:
    return [
        ToolCall(index, f"call_{index + 1}", name),
        ToolArguments(index, dumps(arguments)),
        ToolCallEnd(index),
    ]


# ---- CDATA
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("<![CDATA[a < b && c\nd]]>", "a < b && c\nd"),
        ("\n<![CDATA[\n a \n]]>\n", "\n a \n"),
        ("<![CDATA[</param></function>]]>", "</param></function>"),
        ("<![CDATA[a]]]]><![CDATA[>b]]>", "a]]>b"),
        ("<![CDATA[x[y[0]]]]>", "x[y[0]]"),
        ("<![CDATA[a]]> and ]]>]]>", "a]]> and ]]>"),
        ("<![CDATA[]]>", ""),
        ("a <![CDATA[b]]>", "a <![CDATA[b]]>"),
    ],
)
def test_cdata_around_a_value_is_markup(written: str, meant: str) -> None:
    text = f'<function name="run"><param name="code">{written}</param></function>'
    row = FormatRow("minicpm5 (CDATA)")
    case = Fixture("CDATA", text, call_events(0, "run", {"code": meant}))
    check_cuts(row, sample("minicpm5"), case, lexicon(sample("minicpm5"), tokens=False))
    assert not row.differences, row.first
