r"""Loads a checkpoint's `response_template` as the format that parses such answers.

A template that is not supported is refused when the model is loaded, by a ValueError that names the
field. An answer can never make a template fail later. Not supported are:

- fields other than thinking, content and tool calls
- thinking and content that are not text
- tool calls whose bodies are neither JSON nor flat tags
- transforms that are not a name and arguments
- patterns other than those described below

Keys that only matter to a whole message are accepted and ignored: `defaults`, `start_anchor`,
`repeats`, `join`, `optional`.

A regular expression may describe where a region opens or closes. Most of those in use are a literal
with a name after it: `<tool_call>\s*<function=(?P<name>\w+)>`. A pattern is supported if each of
its alternatives consists of these parts, in this order:

1. a literal
2. optional blanks
3. named groups and repeated classes of characters
4. a literal, which may be missing only after a group

Answers are searched for the first literal like for any marker. The text between the two literals is
matched once and has a limited length. So patterns take linear time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.formats.call_parser import CallSyntax
from gateway.formats.gemma import Gemma
from gateway.formats.json_call import CallKeys
from gateway.formats.json_tags import JsonTags
from gateway.formats.named_json import NamedJson
from gateway.formats.response_template import NAMED, ResponseTemplate
from gateway.formats.response_template_regions import (
    RegionOpening,
    TemplateRegion,
    atom_letter,
    pattern_atoms,
)
from gateway.formats.xml_parameters import XmlParameters

KINDS = {
    "thinking": "thinking",
    "reasoning": "thinking",
    "reasoning_content": "thinking",
    "content": "content",
    "tool_calls": "tool_calls",
}
TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
FIELD_KEYS = {"open", "open_pattern", "close", "close_pattern", "content", "content_args",
              "repeats", "join", "optional", "transform", "transform_each"}  # fmt: skip
PLACEHOLDER = re.compile(r"\{(\w+)(?:\.(\w+))?\}")
TAG_PATTERN = re.compile(
    r"(?P<open>.+?)\(\?P<key>(?P<of>.+?)\+\)(?P<rest>.*?>)(?P<blanks>(?:\\s\*)?)"
    r"\(\?P<value>\.\*\?\)(?:\\s\*)?(?P<close></.+>)",
    re.DOTALL,
)


def parse(source: str) -> ResponseTemplate:
    """Load a template from JSON text. Raise ValueError if it is not supported, or not JSON."""
    try:
        template = msgspec.json.decode(source)
    except msgspec.DecodeError as error:
        raise ValueError(f"response_template: {error}") from error
    if not isinstance(template, dict):
        raise ValueError("response_template: must be an object")
    return load(template)


def load(template: Mapping[str, Any]) -> ResponseTemplate:
    """Load a template. Raise ValueError with the reason if it is not supported."""
    if template.get("version", 1) != 1:
        raise ValueError(f"response_template: version {template['version']!r} is not supported")
    if unknown := set(template) - TEMPLATE_KEYS:
        raise ValueError(f"response_template: unknown keys {sorted(unknown)}")
    fields = template.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise ValueError("response_template: `fields` must be an object that is not empty")
    regions = []
    for name, field in fields.items():
        try:
            regions.append(_region(name, field))
        except ValueError as error:
            raise ValueError(f"response_template, field {name!r}: {error}") from error
    _check_together(regions)
    if not any(region.kind == "content" for region in regions) and all(r.open for r in regions):
        regions.append(TemplateRegion("content"))
    return ResponseTemplate(regions=tuple(regions), anchor=_anchor(template))


def _anchor(template: Mapping[str, Any]) -> str:
    """Return the template's anchor; the first one if there are several."""
    found = template.get("start_anchor") or ""
    found = found[0] if isinstance(found, list) else found
    if not isinstance(found, str):
        raise ValueError("response_template: `start_anchor` must be a string or a list of strings")
    return found


def _check_together(regions: Sequence[TemplateRegion]) -> None:
    """Raise ValueError if the regions cannot be parsed together."""
    if sum(not region.open for region in regions) > 1:
        raise ValueError("response_template: more than one field has no opening")
    if sum(region.calls is not None for region in regions) > 1:
        raise ValueError("response_template: more than one field holds tool calls")
    literals = [opening.literal for region in regions for opening in region.open]
    if len(set(literals)) < len(literals):
        raise ValueError("response_template: two openings begin with the same literal")


def _region(name: str, field: Any) -> TemplateRegion:
    if name not in KINDS:
        raise ValueError(f"only {sorted(KINDS)} are supported")
    if not isinstance(field, Mapping):
        raise ValueError("must be an object")
    if unknown := set(field) - FIELD_KEYS:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    kind, opens, closes = KINDS[name], _opens(field), _closes(field)
    if kind != "tool_calls":
        if field.get("content", "text") != "text" or field.get("transform") is not None:
            raise ValueError("only text without a `transform` is supported outside of tool calls")
        return TemplateRegion(kind, opens, closes)
    if not opens:
        raise ValueError("tool calls need an opening")
    calls, capture = _calls(field, opens, closes)
    return TemplateRegion(kind, opens, closes, calls, capture)


def _literals(field: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = field[key]
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(v, str) and v for v in found):
        raise ValueError(f"`{key}` must be a string or a list of strings")
    return tuple(sorted(dict.fromkeys(found), key=len, reverse=True))


def _opens(field: Mapping[str, Any]) -> tuple[RegionOpening, ...]:
    if "open" in field and "open_pattern" in field:
        raise ValueError("`open` and `open_pattern` cannot both be set")
    if "open_pattern" in field:
        return openings(str(field["open_pattern"]))
    return tuple(map(RegionOpening, _literals(field, "open"))) if "open" in field else ()


def _closes(field: Mapping[str, Any]) -> tuple[str, ...]:
    if "close" in field and "close_pattern" in field:
        raise ValueError("`close` and `close_pattern` cannot both be set")
    if "close_pattern" in field:
        return closings(str(field["close_pattern"]))
    return _literals(field, "close") if "close" in field else ()


# ---- tool calls


def _calls(
    field: Mapping[str, Any], opens: tuple[RegionOpening, ...], closes: tuple[str, ...]
) -> tuple[CallSyntax, str]:
    """Return (syntax of the body, name of the group in the opening that matches the tool's name).
    The group's name is "" if the body contains the tool's name."""
    literals = tuple(opening.literal for opening in opens)
    name, arguments = _shape(field)
    capture = "" if name.startswith("content") else name
    args = _object(field, "content_args")
    if capture and any(f"(?P<{capture}>" not in opening.pattern for opening in opens):
        raise ValueError(f"no opening captures {capture!r}")
    if capture and arguments != "content":
        raise ValueError("if the name is in the opening, the whole body must be the arguments")
    match field.get("content", "text"):
        case "json" if not capture:
            if args.get("string_delims") or args.get("unquoted_keys"):
                raise ValueError("if the JSON is not strict, the name must be in the opening")
            keys = _keys(name, arguments)
            if field.get("transform_each"):
                return JsonTags(open=literals, close=closes, keys=keys, array=True), ""
            line = "\n"
            return JsonTags(open=literals, close=closes, keys=keys, before=line, after=line), ""
        case "json" if args.get("string_delims") or args.get("unquoted_keys"):
            return _loose(literals, closes, args), capture
        case "json":
            return NamedJson(call_open=literals, name_end=(NAMED,), call_close=closes), capture
        case "xml-inline" if capture:
            return _tags(literals, closes, args), capture
        case parser:
            raise ValueError(f"tool calls of {parser!r} are not supported")


def _object(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under `key`; empty if missing. Raise ValueError if it is not an object."""
    found = of.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"`{key}` must be an object")
    return found


def _shape(field: Mapping[str, Any]) -> tuple[str, str]:
    """Return the places of a call's name and arguments. A place is the name of a group in the
    opening, or a path that starts with `content`."""
    transform = field.get("transform")
    if transform is None:
        return "content.function", "content.function"
    function = transform.get("function", transform) if isinstance(transform, Mapping) else None
    each = bool(field.get("transform_each"))
    if function == "{content}":
        return "content.name", "content.arguments"
    if not isinstance(function, Mapping):
        raise ValueError("`transform` must say where the name and the arguments are")
    return _path(function.get("name"), each), _path(function.get("arguments"), each)


def _path(placeholder: Any, each: bool) -> str:
    found = PLACEHOLDER.fullmatch(placeholder) if isinstance(placeholder, str) else None
    if found is None:
        raise ValueError(f"`transform`: {placeholder!r} is not supported")
    path = found[1] + (f".{found[2]}" if found[2] else "")
    return f"content.{path}" if each else path


def _keys(name: str, arguments: str) -> CallKeys:
    """Return the keys of the JSON object that these paths lead to."""
    if name == arguments:  # the whole call as the API shows it
        return CallKeys(name=("function", "name"), arguments=("arguments",))
    parts = [path.split(".") for path in (name, arguments)]
    if any(len(part) != 2 or part[0] != "content" for part in parts):
        raise ValueError(f"a name at {name!r} with arguments at {arguments!r} is not supported")
    return CallKeys(name=(parts[0][1],), arguments=(parts[1][1],))


def _loose(literals: tuple[str, ...], closes: tuple[str, ...], args: Mapping[str, Any]) -> Gemma:
    match args.get("string_delims"):
        case [[str(quote), str(other)]] if quote and quote == other and args.get("unquoted_keys"):
            pass
        case _:
            raise ValueError(
                "JSON that is not strict needs keys without quotes and one string mark"
            )
    if len(literals) != 1 or len(closes) != 1:
        raise ValueError("JSON that is not strict needs one opening and one closing")
    return Gemma(open=literals[0], close=closes[0], quote=quote)


def _tags(
    literals: tuple[str, ...], closes: tuple[str, ...], args: Mapping[str, Any]
) -> XmlParameters:
    """Return the syntax of bodies with one tag per argument. The template's `tag_pattern` must have
    the form `LITERAL(key)...>(value)</LITERAL>`."""
    found = TAG_PATTERN.fullmatch(str(args.get("tag_pattern", "")))
    if found is None or not closes:
        raise ValueError("`tag_pattern` is not a tag with a key, a value and a closing tag")
    opening = openings(f"{found['open']}(?P<key>{found['of']}+){found['rest']}")[0]
    literal = opening.literal
    quoted = found["open"].endswith(('="', "='"))
    if quoted:
        literal = literal.rstrip("\"'")
        literal = literal if literal.endswith("=") else literal + " name="
    value_parser = _object(args, "value_parser")
    if args.get("merge_duplicates") or value_parser.get("name", "text") not in ("text", "json"):
        raise ValueError("only text and JSON are supported as values of tags")
    return XmlParameters(
        open=literals,
        close=closes,
        call_open=NAMED,
        call_close="\0",
        parameter_open=literal,
        parameter_close=closings(found["close"])[0],
        quoted=quoted,
        trim="blanks" if found["blanks"] or value_parser else "nothing",
        around="\n" if found["blanks"] else "",
        bare_json=value_parser.get("name") == "json",
        doubts=False,
    )


# ---- patterns

MAX_REPEATS = 4


def openings(pattern: str) -> tuple[RegionOpening, ...]:
    """Return one opening per alternative of `pattern`. Raise ValueError if it is not supported."""
    return tuple(_opening(alternative, pattern) for alternative in alternatives(pattern))


def closings(pattern: str) -> tuple[str, ...]:
    """Return the literals of a pattern that closes a region. An alternative that is the end of the
    answer is left out. Raise ValueError for any other alternative."""
    found = [_opening(part, pattern) for part in alternatives(pattern) if part not in ("$", r"\Z")]
    for opening in found:
        if opening.pattern or not opening.literal:
            raise ValueError(f"the pattern {pattern!r} closes a region with more than a literal")
    return tuple(opening.literal for opening in found)


def alternatives(pattern: str) -> list[str]:
    """Return the pattern split at each `|` outside of parentheses and classes."""
    if pattern.startswith("(?:") and _closes_at(pattern) == len(pattern) - 1:
        return alternatives(pattern[3:-1])
    parts, start, depth, in_class = [], 0, 0, False
    for at, char in _unescaped(pattern):
        in_class = char == "[" or (in_class and char != "]")
        if not in_class:
            depth += (char == "(") - (char == ")")
            if char == "|" and depth == 0:
                parts.append(pattern[start:at])
                start = at + 1
    return [*parts, pattern[start:]]


def _unescaped(pattern: str) -> list[tuple[int, str]]:
    """Return (position, character) for each character of the pattern that no backslash escapes."""
    found, at = [], 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        else:
            found.append((at, pattern[at]))
        at += 1
    return found


def _closes_at(pattern: str) -> int:
    """Return the position of the parenthesis that closes the one at the pattern's start, or -1 if
    it is not closed."""
    depth = 0
    for at, char in _unescaped(pattern):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return at
    return -1


def _opening(pattern: str, whole: str) -> RegionOpening:
    if pattern in ("^", r"\A"):
        return RegionOpening(at_start=True)
    atoms = pattern_atoms(pattern, whole)
    while atoms and atoms[0].lastgroup == "blank":
        atoms.pop(0)
    while atoms and atoms[-1].lastgroup == "blank":
        atoms.pop()
    letters = [atom_letter(atom) for atom in atoms]
    first = next((n for n, letter in enumerate(letters) if letter is None), len(letters))
    literal = "".join(letter or "" for letter in letters[:first])
    if not literal:
        raise ValueError(f"the pattern {whole!r} does not begin with a literal")
    if first == len(letters):
        return RegionOpening(literal)
    last_start = next(n for n in range(len(letters), 0, -1) if letters[n - 1] is None)
    until = "".join(letter or "" for letter in letters[last_start:])
    last = atoms[-1]["of"] or ""
    if not until and not last:
        raise ValueError(f"the pattern {whole!r} ends with neither a literal nor a group")
    if sum(not (atom["bound"] or atom_letter(atom)) for atom in atoms) > MAX_REPEATS:
        raise ValueError(f"the pattern {whole!r} has more than {MAX_REPEATS} repetitions")
    return RegionOpening(literal, "".join(atom[0] for atom in atoms), until, last)
