"""The errors of msgspec in plain words: no message of ours has a name of a type in it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from gateway.app import operations
from gateway.http.body import convert
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_errors import in_words


class Plain(msgspec.Struct, forbid_unknown_fields=True):
    a: int


class First(msgspec.Struct, tag="first"):
    a: int


class Second(msgspec.Struct, tag="second"):
    a: int


SHAPES: list[tuple[Any, Any, str]] = [
    (int, "x", "must be a whole number, not a string"),
    (int | None, "x", "must be a whole number or null, not a string"),
    (int, 1.5, "must be a whole number, not a number with decimals"),
    (float, "x", "must be a number, not a string"),
    (float, None, "must be a number, not null"),
    (str, 1, "must be a string, not a number"),
    (bool, 1, "must be true or false, not a number"),
    (int, True, "must be a whole number, not a boolean"),
    (list[int], {}, "must be a list, not an object"),
    (Plain, [], "must be an object, not a list"),
    (int | str | None, [], "must be a whole number, a string or null, not a list"),
    (Plain, {}, "the field 'a' is required"),
    (Plain, {"a": 1, "b": 2}, "unknown field 'b'"),
    (Annotated[int, Meta(ge=1)], 0, "must be a whole number, at least 1"),
    (Annotated[int, Meta(le=1 << 24)], 1 << 25, "must be a whole number, at most 16,777,216"),
    (Annotated[float, Meta(le=2)], 3.0, "must be a number, at most 2"),
    (Annotated[float, Meta(le=2.5)], 3.0, "must be a number, at most 2.5"),
    (Annotated[float, Meta(gt=0)], 0.0, "must be a number above 0"),
    (Annotated[float, Meta(lt=2)], 3.0, "must be a number below 2"),
    (Annotated[int, Meta(multiple_of=2)], 3, "must be a multiple of 2"),
    (Annotated[str, Meta(min_length=1)], "", "must have at least 1 character"),
    (Annotated[str, Meta(max_length=3)], "abcd", "must have at most 3 characters"),
    (Annotated[list[int], Meta(max_length=1)], [1, 2], "must have at most 1 item"),
    (Annotated[dict[str, int], Meta(min_length=2)], {}, "must have at least 2 members"),
    (tuple[int, int], [1], "must have 2 items"),
    (Annotated[str, Meta(pattern="^a$")], "b", "must match the pattern '^a$'"),
    (Literal["a", "b"], "c", "'c' is not an allowed value"),
    (Literal[1, 2], 3, "3 is not an allowed value"),
    (First | Second, {"type": "third", "a": 1}, "'third' is not an allowed value"),
    (First | Second, {"a": 1}, "the field 'type' is required"),
    (list[Annotated[int, Meta(ge=0)]], [-1], "must be a whole number, at least 0"),
]


@pytest.mark.parametrize(("kind", "value", "words"), SHAPES, ids=lambda each: str(each)[:40])
def test_each_shape_of_message_has_its_words(kind: Any, value: Any, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert(value, kind)
    assert in_words(str(error.value)) == words


def test_a_message_of_another_shape_is_kept() -> None:
    assert in_words("a prompt of 3 tokens") == "a prompt of 3 tokens"


WRONG: list[Any] = [None, True, -1, 1 << 60, -1.5, 1e30, "", "x" * 20_000, [], [[]], {}, {"x": {}}]
BODIES: set[type] = {body for operation in operations() for body in operation.takes}


@pytest.mark.parametrize("body", sorted(BODIES, key=str))
def test_no_refusal_of_a_body_names_a_type_of_python(body: type) -> None:
    names = [field.encode_name for field in msgspec.structs.fields(body)]
    refusals = [refusal({name: value}, body) for name in names for value in WRONG]
    assert any(refusals)
    assert not [text for text in refusals if re.search(r"`|Expected|\bgot\b|Invalid", text)]


def refusal(fields: dict[str, Any], body: type) -> str:
    """Return the message with which a body is refused; "" if it is not."""
    try:
        convert(fields, body)
    except InvalidRequest as error:
        return error.message
    return ""
