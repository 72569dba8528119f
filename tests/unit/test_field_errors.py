"""The errors of msgspec in plain words: no message of ours has a name of a type in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from gateway.app import operations
from gateway.http.body import convert
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_errors import field_error
from protocol.wire.field_words import allowed_words, shown
from tests.support.processes import ROOT


class Plain(msgspec.Struct, forbid_unknown_fields=True):
    a: int


class First(msgspec.Struct, tag="first"):
    a: int


class Second(msgspec.Struct, tag="second"):
    a: int


Level = Annotated[int, Meta(ge=1, le=1 << 24)]
SHAPES: list[tuple[Any, Any, str]] = [
    (int, "many", 'must be a whole number; got the text "many"'),
    (int | None, "x", 'must be a whole number or null; got the text "x"'),
    (Level | None, "x", 'must be a whole number from 1 to 16,777,216, or null; got the text "x"'),
    (int, 1.5, "must be a whole number; got 1.5"),
    (float, "", "must be a number; got an empty text"),
    (float, None, "must be a number; got null"),
    (str, 1, "must be a string; got 1"),
    (bool, 1, "must be true or false; got 1"),
    (bool | None, 1, "must be true, false or null; got 1"),
    (int, True, "must be a whole number; got true"),
    (list[int], {}, "must be a list; got an empty object"),
    (Plain, [1], "must be an object; got a list of 1 item"),
    (int | str | None, [], "must be a whole number, a string or null; got an empty list"),
    (Plain, {}, "a: this field is required"),
    (Plain, {"a": 1, "aa": 2}, "aa: unknown field; did you mean a?"),
    (Plain, {"a": 1, "zzz": 2}, "zzz: unknown field; known fields: a"),
    (Plain, {"a": 1, "z z": 2}, 'unknown field "z z"; known fields: a'),
    (list[Plain], [{"a": "b"}], '[0].a: must be a whole number; got the text "b"'),
    (Level, 0, "must be a whole number from 1 to 16,777,216; got 0"),
    (
        Level,
        10**40,
        "must be a whole number from 1 to 16,777,216; got a number of more than 24 dig",
    ),
    (Annotated[int, Meta(ge=1)], 0, "must be a whole number of at least 1; got 0"),
    (Annotated[float, Meta(le=2.5)], 3.0, "must be a number of at most 2.5; got 3.0"),
    (Annotated[float, Meta(gt=0)], 0.0, "must be a number above 0; got 0.0"),
    (Annotated[float, Meta(gt=0, le=1)], 2, "must be a number above 0 and at most 1; got 2"),
    (Annotated[float, Meta(ge=0, lt=2)], 3, "must be a number of at least 0 and below 2; got 3"),
    (
        Annotated[int, Meta(multiple_of=2)],
        3,
        "must be a whole number that is a multiple of 2; got 3",
    ),
    (
        Annotated[str, Meta(min_length=1)],
        "",
        "must be a string that is not empty; got an empty text",
    ),
    (
        Annotated[str, Meta(max_length=3)],
        "a" * 1000,
        "must be a string of at most 3 characters; got a text of 1,000 characters that starts with "
        f'"{"a" * 40}"',
    ),
    (Annotated[list[int], Meta(max_length=1)], [1, 2], "must be a list of at most 1 item; got a "),
    (
        Annotated[dict[str, int], Meta(min_length=2)],
        {},
        "must be an object of at least 2 members; ",
    ),
    (tuple[int, int], [1], "must be a list of 2 items; got a list of 1 item"),
    (
        Annotated[str, Meta(pattern="^a$")],
        "b",
        "must be a string that matches the pattern ^a$; got",
    ),
    (Literal["a", "b"], "c", 'must be one of "a", "b"; got the text "c"'),
    (Literal["a", "b"] | None, 5, 'must be one of "a", "b", or null; got 5'),
    (Literal["a"] | int, "c", 'must be a whole number or "a"; got the text "c"'),
    (Literal[1, 2], 3, "must be one of 1, 2; got 3"),
    (First | Second, {"type": "third", "a": 1}, 'type: must be one of "first", "second"; got the '),
    (First | Second, {"a": 1}, "type: this field is required"),
    (First | Second, {"type": "second", "a": "x"}, 'a: must be a whole number; got the text "x"'),
    (First | Second, [], "must be an object; got an empty list"),
    (list[Annotated[int, Meta(ge=0)]], [-1], "[0]: must be a whole number of at least 0; got -1"),
    (dict[int, int], {"1": 1, "2": "b"}, '2: must be a whole number; got the text "b"'),
    (dict[int, int], {"1": 1, "b": 2}, 'b: each key must be a whole number; got the text "b"'),
    (dict[str, dict[str, int]], {"a": {"b": None}}, "a: must be a whole number"),
]


@pytest.mark.parametrize(("kind", "value", "words"), SHAPES, ids=lambda each: str(each)[:40])
def test_each_misfit_says_what_is_allowed_and_what_came(kind: Any, value: Any, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert(value, kind, str_keys=True)
    assert str(field_error(error.value, value, kind)).startswith(words)


class Checked(msgspec.Struct):
    a: int

    def __post_init__(self) -> None:
        raise ValueError("a: must be even" if self.a else "no value fits")


@pytest.mark.parametrize(("a", "words"), [(1, "[0].a: must be even"), (0, "[0]: no value fits")])
def test_an_own_check_of_a_struct_keeps_its_words_and_gets_its_path(a: int, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert([{"a": a}], list[Checked])
    assert str(field_error(error.value, [{"a": a}], list[Checked])) == words


HOSTILE = '"\\\n\x1b[2J\u202e\ud7ff'


def test_what_came_is_shown_in_one_short_line() -> None:
    assert shown(HOSTILE) == 'the text "\\"\\\\\\u000a\\u001b[2J\\u202e\\ud7ff"'
    values = [HOSTILE * 99, 10**9999, -(10**9999), 1e308, {HOSTILE: 1}, [HOSTILE] * 9999, b"x"]
    assert all(len(shown(value)) < 320 and shown(value).isprintable() for value in values)


def test_choices_of_several_types_are_one_list() -> None:
    assert allowed_words(Literal["a"] | Literal["b"] | None) == 'one of "a", "b", or null'
    assert allowed_words(Literal[tuple(map(str, range(30)))]).endswith(" and 6 others")


FOREIGN = re.compile(r"`|\b(Expected|Invalid|int|str|float|bool|dict|None|NoneType|True|False)\b")
"""Words of Python and of msgspec."""
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
WRONG: list[Any] = [None, True, -1, 1 << 60, -1.5, 1e30, "", "x" * 20_000, [], [[]], {}, {"x": {}}]
BODIES: set[type] = {body for operation in operations() for body in operation.takes}


@pytest.mark.parametrize("body", sorted(BODIES, key=str))
def test_no_refusal_of_a_body_names_a_type_of_python(body: type) -> None:
    names = [field.encode_name for field in msgspec.structs.fields(body)]
    refusals = [refusal({name: value}, body) for name in names for value in WRONG]
    assert any(refusals)
    assert not [text for text in refusals if FOREIGN.search(QUOTED.sub("", text))]


def refusal(fields: dict[str, Any], body: type) -> str:
    """Return the message with which a body is refused; "" if it is not."""
    try:
        convert(fields, body)
    except InvalidRequest as error:
        return error.message
    return ""


# ---- the refusals that the gateway writes itself


STRANGE = {
    r"\bgot \{": "InvalidRequest.wrong shows a value short and escaped",
    r"(\bit is|, not) \{": "a refusal says what came after 'got'",
    r"\bnon-empty\b|\bnull or\b": "an allowed value is described in the words of field_words",
    r"`|\b(int|str|float|bool|dict|None|NoneType|True|False)\b": "clients do not know Python",
    r"^[\w.{}\[\]]+ must ": "a colon follows the path",
}
"""Pattern in the text of a refusal -> the rule that it breaks."""
NUMBERS = re.compile(r"got \{[^{}]*:,\}|got \{(self\.max_tokens|len\(members\))\}")
"""A count cannot be long."""


def refusal_texts() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of each refusal in the gateway and in protocol. Expressions stand in
    braces, as in the source."""
    for path in sorted([*(ROOT / "gateway").rglob("*.py"), *(ROOT / "protocol").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and "InvalidRequest" in ast.unparse(node.func):
                for part in node.args:
                    if isinstance(part, ast.Constant | ast.JoinedStr):
                        text = ast.unparse(part).removeprefix("f")[1:-1]
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def test_refusals_that_the_code_writes_have_one_style() -> None:
    texts = list(refusal_texts())
    assert len(texts) > 300
    assert not [
        (place, text, rule)
        for place, text in texts
        for pattern, rule in STRANGE.items()
        if re.search(pattern, NUMBERS.sub("", text))
    ]


@pytest.mark.parametrize("text", ["{f}: got {kind!r}", "{f}: a; it is {x!r}", "{f} must be b"])
def test_a_text_of_another_style_is_found(text: str) -> None:
    assert any(re.search(pattern, text) for pattern in STRANGE)
