"""Tools that must be called, or called as their schema says -> a grammar in the model's own format.

Written from the same description that the parser reads, so what the grammar admits the parser
understands. For the formats of JSON calls between markers; for any other this gives None, and a
call that was required and not made is told with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.openai.tools import ToolPlan
from gateway.output.formats import BoundFormat
from gateway.output.teller import DeclaredTool
from gateway.output.tools.json_tags import JsonTags
from protocol.grammar import Body, Lark, Structural, Tag

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def tool_grammar(bound: BoundFormat, plan: ToolPlan) -> Body | None:
    """What the body of an answer must look like; None: nothing is demanded, or cannot be here."""
    syntax = bound.format.tools
    if not isinstance(syntax, JsonTags) or not _is_plain(syntax):
        return None
    if plan.mode in ("required", "named"):
        return _calls(syntax, bound, plan)
    if plan.mode == "auto" and plan.strict:
        return _free_text_with_calls(syntax, plan)
    return None


def _is_plain(syntax: JsonTags) -> bool:
    """One object between the first opening and the first closing marker."""
    opener = syntax.open[0]
    is_bound = any(opener == first for first, _ in syntax.bound)
    return not (opener.endswith(("[", "{")) or is_bound or syntax.keys.name_is_key)


def _calls(syntax: JsonTags, bound: BoundFormat, plan: ToolPlan) -> Body:
    """Nothing but calls: one, or as many as the model likes."""
    ids = {marker: token_id for token_id, marker in bound.lexicon.tokens.items()}
    tools = [tool for tool in plan.declared if plan.name in (None, tool.name)]
    rules = [f"start: {'call' if not plan.many else 'call (BLANKS? call)*'}"]
    rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(tools))))
    for place, tool in enumerate(tools):
        begin, end = _around(syntax, tool)
        parts = [*_spelt(begin, syntax.open[0], ids), f"@args_{place}"]
        parts += _spelt(end, _closer(syntax), ids)
        rules.append(f"call_{place}: {' '.join(parts)}")
    rules.append(r"BLANKS: /[ \n]{1,2}/")
    schemas = {f"args_{place}": _schema(tool) for place, tool in enumerate(tools)}
    return Lark(text="\n".join(rules), schemas=schemas)


def _free_text_with_calls(syntax: JsonTags, plan: ToolPlan) -> Body:
    """Any text; but a call is one of these, and a strict tool's arguments fit its schema."""
    tags = []
    for tool in plan.declared:
        begin, end = _around(syntax, tool)
        schema = _schema(tool) if tool.name in plan.strict else _json(ANY_OBJECT)
        tags.append(Tag(begin=begin, schema=schema, end=end))
    return Structural(triggers=[syntax.open[0]], tags=tags, only_one=not plan.many)


def _around(syntax: JsonTags, tool: DeclaredTool) -> tuple[str, str]:
    """The text before and behind the arguments of a call."""
    name, arguments = (_json(key) for key in (syntax.keys.name[0], syntax.keys.arguments[0]))
    begin = f"{syntax.open[0]}\n{{{name}: {_json(tool.name)}, {arguments}: "
    closer = _closer(syntax)
    return begin, "}" + (f"\n{closer}" if closer else "")


def _closer(syntax: JsonTags) -> str:
    return syntax.close[0] if syntax.is_closed(syntax.open[0]) else ""


def _spelt(text: str, marker: str, ids: Mapping[str, int]) -> list[str]:
    """`text` in Lark, the marker in it by its id where it has one."""
    if marker not in ids:
        return [_json(text)]
    before, _, behind = text.partition(marker)
    parts = [_json(before) if before else "", f"<[{ids[marker]}]>", _json(behind) if behind else ""]
    return [part for part in parts if part]


def _schema(tool: DeclaredTool) -> str:
    return _json(tool.parameters or ANY_OBJECT)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
