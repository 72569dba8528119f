"""response_format, structured_outputs -> the form of the answer, in protocol's words.

Only the shape of the request is checked here: whether a schema or a grammar can be enforced the
engine says, before any header is sent. Raises InvalidRequest naming the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.openai.schema import GenerationBody
from protocol.errors import InvalidRequest
from protocol.grammar import (
    Body,
    Choice,
    Gbnf,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    Structural,
    Tag,
)

FIELDS = ("response_format", "structured_outputs")
_LARK_START = "start:"


def answer_form(body: GenerationBody) -> tuple[str, Body] | None:
    """(the field that asks for it, the form); None: free text."""
    formats = [
        (field, form)
        for field, form in zip(
            FIELDS, (_response_format(body), structured_form(body.structured_outputs)), strict=True
        )
        if form is not None
    ]
    if len(formats) > 1:
        raise InvalidRequest(
            "structured_outputs: response_format already says what the answer looks like",
            param="structured_outputs",
        )
    return formats[0] if formats else None


def _response_format(body: GenerationBody) -> Body | None:
    format = body.response_format
    if format is None:
        return None
    at = "response_format"
    match _object(format, at).get("type"):
        case "text":
            return None
        case "json_object":
            return JsonObject()
        case "json_schema":
            inner = _object(format.get("json_schema"), f"{at}.json_schema")
            return _schema(inner.get("schema"), f"{at}.json_schema.schema")
        case "structural_tag":
            return _structural(format, at)
        case kind:
            raise InvalidRequest(
                f"{at}.type must be one of text, json_object, json_schema, structural_tag; it is "
                f"{kind!r}",
                param=f"{at}.type",
            )


def structured_form(value: Any, at: str = "structured_outputs") -> Body | None:
    """What vLLM's `structured_outputs` asks for; `at` is where it stands in the body."""
    if value is None:
        return None
    members = _object(value, at)
    asked = [name for name, value in members.items() if value is not None]
    for name in asked:
        if name not in _KINDS:
            raise InvalidRequest(
                f"{at}.{name}: unknown; one of {', '.join(_KINDS)} is expected",
                param=f"{at}.{name}",
            )
    if len(asked) != 1:
        raise InvalidRequest(
            f"{at} must have exactly one of {', '.join(_KINDS)}; it has {len(asked)}", param=at
        )
    (name,) = asked
    return _KINDS[name](members[name], f"{at}.{name}")


def _object(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{at} must be an object", param=at)
    return value


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{at} must be a text that is not empty", param=at)
    return value


def _schema(value: Any, at: str) -> Body:
    return JsonSchema(text=_schema_text(value, at))


def _schema_text(value: Any, at: str) -> str:
    """A schema as an object or as JSON text; `true` and `false` are schemas, too, but of no use."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(_text(value, at))
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise InvalidRequest(f"{at} is not JSON: {error}", param=at) from None
    return msgspec.json.encode(_object(value, at)).decode()


def _json_object(value: Any, at: str) -> Body:
    if value is not True:
        raise InvalidRequest(f"{at} must be true, where it is given", param=at)
    return JsonObject()


def _choices(value: Any, at: str) -> Body:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{at} must be a list that is not empty", param=at)
    return Choice(choices=[_text(choice, f"{at}[{i}]") for i, choice in enumerate(value)])


def _grammar(value: Any, at: str) -> Body:
    """Lark, which has a rule `start`, or GBNF, which has `root ::=`."""
    text = _text(value, at)
    return Gbnf(text=text) if "::=" in text and _LARK_START not in text else Lark(text=text)


def _structural(value: Any, at: str) -> Body:
    """`structures` of {begin, schema, end}, and the `triggers` that begin one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(_text(value, at))
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise InvalidRequest(f"{at} is not JSON: {error}", param=at) from None
    value = _object(value, at)
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise InvalidRequest(f"{at} must have the lists structures and triggers", param=at)
    return Structural(
        triggers=[_text(trigger, f"{at}.triggers[{i}]") for i, trigger in enumerate(triggers)],
        tags=[_tag(tag, f"{at}.structures[{i}]") for i, tag in enumerate(structures)],
    )


def _tag(value: Any, at: str) -> Tag:
    tag = _object(value, at)
    return Tag(
        begin=_text(tag.get("begin"), f"{at}.begin"),
        schema=_schema_text(tag.get("schema", {}), f"{at}.schema"),
        end=_text(tag.get("end"), f"{at}.end"),
    )


_KINDS: Mapping[str, Callable[[Any, str], Body]] = {
    "json": _schema,
    "json_object": _json_object,
    "regex": lambda value, at: Regex(pattern=_text(value, at)),
    "choice": _choices,
    "grammar": _grammar,
    "structural_tag": _structural,
}
