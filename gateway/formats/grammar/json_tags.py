"""Calls as JSON objects, and Mistral's, whose vocabulary tells in which of two ways they are
written.

Between the items of an array blanks are as free as in any JSON; everything else is spelt as the
templates spell it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar import named_json
from gateway.formats.grammar.forms import either, optional, quoted, repeated, sequence, several
from gateway.formats.grammar_builder import ANY_OBJECT, GrammarBuilder
from gateway.formats.json_tags import JsonTags
from gateway.formats.mistral import Mistral
from protocol.grammar import Form, Pattern

BLANKS = Pattern(r"[ \n]{0,8}")
NUMBER = Pattern("[0-9]{1,3}")


def stretch(
    syntax: JsonTags, opener: str, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    begun, opener = opener, _unbound(syntax, opener)
    bound = dict(syntax.bound).get(begun, "")
    before, behind = ("\n", "\n") if opener in syntax.lines else (syntax.before, syntax.behind)
    closer = syntax.closer(opener)
    before, behind = bound + before, behind + closer if closer else ""
    call = book.rule("call", either(_call(syntax, tool, book) for tool in tools))
    if syntax.array:
        bracket = "" if opener.endswith("[") else "["
        calls = several(call, sequence(",", BLANKS), many=many)
        return sequence(before + bracket, BLANKS, calls, BLANKS, "]" + behind)
    first: Form = call
    if opener.endswith("{"):
        first = either(_call(syntax, tool, book, begun="{") for tool in tools)
    if syntax.separator:
        more = sequence(f"{syntax.separator} ", call)
        first = sequence(first, repeated(more, many=many))
    return sequence(before, first, behind)


def _unbound(syntax: JsonTags, opener: str) -> str:
    """The opener alone, where it stands with the marker that it needs behind it."""
    return next((first for first, marker in syntax.bound if opener == first + marker), opener)


def _call(syntax: JsonTags, tool: DeclaredTool, book: GrammarBuilder, begun: str = "") -> Form:
    """One object; `begun` is what the opener has written of it."""
    keys, name, arguments = syntax.keys, quoted(tool.name), book.arguments(tool)
    if keys.name_is_key:
        return sequence(f"{{{name}: ".removeprefix(begun), arguments, "}")
    number: tuple[Form | str, ...] = ()
    if syntax.number:
        number = (f'{quoted(syntax.number)}: "', NUMBER, '", ')
    return sequence(
        "{".removeprefix(begun),
        *number,
        f"{quoted(keys.name[0])}: {name}, {quoted(keys.arguments[0])}: ",
        arguments,
        *([_id(keys.id[0])] if keys.id else []),
        "}",
    )


def _id(key: str) -> Form:
    return optional(sequence(f', {quoted(key)}: "', named_json.CALL_ID, '"'))


# ---- calls that begin like any JSON


def json_values(
    syntax: JsonTags, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    """Calls without a marker, written like any JSON, for an answer that may be other JSON instead.

    The grammar's lexer reads the longest text it knows. If calls were spelt exactly here, it would
    read `{"name": ` of every other object as the beginning of a call.
    """
    if syntax.array:
        calls = [_call_schema(syntax, tool, f"#/items/anyOf/{n}") for n, tool in enumerate(tools)]
        most = {} if many else {"maxItems": 1}
        return book.json({"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most})
    call = book.rule("call", either(book.json(_call_schema(syntax, tool)) for tool in tools))
    return several(call, f"{syntax.separator} ", many=many and bool(syntax.separator))


def _call_schema(syntax: JsonTags, tool: DeclaredTool, place: str = "#") -> Mapping[str, Any]:
    """`place`: where it stands in the whole schema."""
    name, arguments = syntax.keys.name[0], syntax.keys.arguments[0]
    parameters = {**(tool.parameters or {}), **ANY_OBJECT}
    moved = _moved(parameters, f"{place}/properties/{arguments}")
    return {
        "type": "object",
        "properties": {name: {"const": tool.name}, arguments: moved},
        "required": [name, arguments],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """The same schema at another place of a document, to which its references lead now."""
    if isinstance(schema, Mapping):
        return {
            key: place + value.removeprefix("#")
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(item, place) for item in schema] if isinstance(schema, list) else schema


def mistral(
    syntax: Mistral, opener: str, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    if book.lexicon.is_token(syntax.named.name_end[0]):
        return named_json.stretch(syntax.named, opener, tools, many, book)
    return stretch(syntax.array, opener, tools, many, book)
