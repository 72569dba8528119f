"""Finds the end of a JSON value, and the keys of a call's object, in streamed text and linear time.

`JsonScan` follows one value of any kind. It tracks strings, escapes and depth, so nothing inside a
string ends the value. `CallScan` follows an object that is a call. It finds the name and the
arguments wherever their keys stand, and emits the arguments byte for byte as they come; arguments
before the name wait for it.

Both read with `scan`, and stop at the end of the value or at a character that JSON does not allow
outside strings; the caller decides what that means. Their state is plain data.
"""

from __future__ import annotations

import json
import re
from typing import Literal

import msgspec

from gateway.formats.event_builder import EventBuilder
from gateway.formats.json_object import PLAIN, mended_object
from gateway.text.markers import match_end

Status = Literal["more", "end", "broken"]
"""The value continues; it has ended; it cannot be JSON at this position."""

IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
STRUCTURE = re.compile(r"[^\s0-9A-Za-z+\-.,:]")
SCALAR_END = re.compile(r"[^0-9A-Za-z+\-.]")
SPACE = re.compile(r"[ \t\r\n]*+")


class JsonScan(msgspec.Struct):
    """Position in one value; fresh before its first non-blank character.

    kind     "" before, then "nested", "string" or "scalar"
    depth    number of open brackets
    quoted   inside a string
    escaped  the text so far ends with a backslash whose escape is incomplete
    """

    kind: str = ""
    depth: int = 0
    quoted: bool = False
    escaped: bool = False

    def scan(self, text: str, start: int = 0) -> tuple[int, Status]:
        """Read on from `start`. Return (the position reached, the status).

        A scalar ends before the next character, a string or bracketed value after its last. A
        broken value is broken at that position.
        """
        if not self.kind and start < len(text):
            start = self._begin(text, start)
        if self.kind == "scalar":
            found = SCALAR_END.search(text, start)
            return (found.start(), "end") if found else (len(text), "more")
        return self._scan(text, start)

    def _begin(self, text: str, start: int) -> int:
        char = text[start]
        self.kind = {'"': "string", "{": "nested", "[": "nested"}.get(char, "scalar")
        self.quoted, self.depth = char == '"', int(char in "{[")
        return start if self.kind == "scalar" else start + 1

    def _scan(self, text: str, position: int) -> tuple[int, Status]:
        end, depth, structure = len(text), self.depth, STRUCTURE.search
        while position < end:
            if self.quoted:
                position = self._string(text, position)
                if not self.quoted and self.kind == "string":
                    return position, "end"
                continue
            found = structure(text, position)
            if found is None:
                break
            char, position = found[0], found.end()
            if char == '"':
                self.quoted = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                if not depth:
                    self.depth = 0
                    return position, "end"
            else:
                self.depth = depth
                return position - 1, "broken"
        self.depth = depth
        return end, "more"

    def _string(self, text: str, position: int) -> int:
        """Read to the end of the string or of the text."""
        if self.escaped:
            self.escaped = False
            position += 1
        found = IN_STRING.match(text, position)
        assert found is not None
        position = found.end()
        if position == len(text):
            return position
        if text[position] == '"':
            self.quoted = False
        else:
            self.escaped = True  # the text ends with a backslash
        return position + 1


class CallKeys(msgspec.Struct, frozen=True):
    """The keys of a call's object. If there are several spellings, models write the first.

    name         the tool's name; an object instead of a string is searched for the keys in turn
    arguments    its arguments
    id           the call's id, if it comes before the others
    name_is_key  each key is a name, and its value the arguments of a call
    strict       an object with any other key (except `also`) is not a call, and a name alone makes
                 it one only if a tool of that name is declared: for calls without markers
    also         further keys that a call may have
    """

    name: tuple[str, ...] = ("name", "function")
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: tuple[str, ...] = ()
    name_is_key: bool = False
    strict: bool = False
    also: tuple[str, ...] = ("type", "id")

    def role(self, key: str) -> str:
        if self.name_is_key or key in self.arguments:
            return "arguments"
        if key in self.name:
            return "name"
        return "id" if key in self.id else "other"


class CallScan(msgspec.Struct):
    """Position in a call's object; fresh before the `{`."""

    phase: str = "open"
    role: str = ""
    value: JsonScan = msgspec.field(default_factory=JsonScan)
    parts: list[str] = []
    tells: bool = False
    nested: int = 0
    told: bool = False
    argued: bool = False
    name: str | None = None
    call_id: str | None = None
    waiting: str | None = None

    @property
    def quoted(self) -> bool:
        """Whether the position is inside a string."""
        return self.value.quoted

    def passes(self, text: str) -> bool:
        """Return whether `text` only continues a string in arguments that are emitted as they come.

        Then `scan` would emit it and change no state.
        """
        value = self.value
        return (
            self.tells
            and value.quoted
            and not value.escaped
            and self.phase == "in_value"
            and PLAIN.fullmatch(text) is not None
        )

    def scan(self, text: str, keys: CallKeys, builder: EventBuilder) -> tuple[int, Status]:
        """Read on. Return (the position reached, the status).

        "end" is after the closing brace: the call has been emitted and ended, if it has a name.
        """
        position = 0
        while position < len(text):
            if self.phase in ("in_key", "in_value"):
                position, status = self._in_value(text, position, keys, builder)
                if status != "end":
                    return position, status
                continue
            position = match_end(SPACE, text, position)
            if position == len(text):
                break
            if not self._structural(text[position], builder):
                return position, "broken"
            if self.phase not in ("in_key", "in_value"):
                position += 1
            if self.phase == "end":
                self._finish(keys, builder)
                return position, "end"
        return position, "more"

    def _structural(self, char: str, builder: EventBuilder) -> bool:
        """Read one character between keys and values. Return whether it is allowed."""
        if self.phase == "open":
            self.phase, self.nested = "key", self.nested + 1
            return char == "{"
        if self.phase == "key":
            return self._expect_key(char)
        if self.phase == "colon":
            self.phase = "value"
            return char == ":"
        if char == "{" and self.role == "name":  # {"function": {"name": ...}}
            self.phase, self.nested = "key", self.nested + 1
            return True
        self.phase, self.value, self.parts = "in_value", JsonScan(), []
        self.tells = char == "{" and self.role == "arguments" and self.name is not None
        if self.tells:
            self._begin(builder)
        return char not in ",:}]"

    def _expect_key(self, char: str) -> bool:
        if char == '"':
            self.phase, self.value, self.parts, self.tells = "in_key", JsonScan(), [], False
        elif char == "}":
            self.nested -= 1
            self.phase = "key" if self.nested else "end"
        else:
            return char == ","
        return True

    def _in_value(
        self, text: str, start: int, keys: CallKeys, builder: EventBuilder
    ) -> tuple[int, Status]:
        position, status = self.value.scan(text, start)
        if self.tells:
            builder.arguments_delta(text[start:position])
        else:
            self.parts.append(text[start:position])
        if status == "end" and not self._complete(keys, builder):
            return position, "broken"
        return position, status

    def _complete(self, keys: CallKeys, builder: EventBuilder) -> bool:
        """Complete a key or value. Return whether it is valid."""
        raw = "".join(self.parts)
        if self.phase == "in_key":
            return self._key(text_of(raw), keys, builder)
        self.phase = "key"
        match self.role:
            case "name":
                name = text_of(raw)
                if name is None:
                    return False
                self._named(name, keys, builder)
            case "id":
                self.call_id = text_of(raw)
            case "arguments" if not self.tells:
                self._arguments(raw, builder)
        return True

    def _key(self, key: str | None, keys: CallKeys, builder: EventBuilder) -> bool:
        if key is None:
            return False
        self.phase, self.role = "colon", keys.role(key)
        if keys.name_is_key:
            self._finish(keys, builder)
            self.told = self.argued = False
            self._named(key, keys, builder)
        elif self.role == "name" and self.name is not None:
            self.role = "again"
        elif self.role == "arguments":
            self.role, self.argued = "again" if self.argued else self.role, True
        return self.role != "other" or not keys.strict or key in keys.also

    def _named(self, name: str, keys: CallKeys, builder: EventBuilder) -> None:
        self.name = name
        if not keys.strict:
            self._begin(builder)
        if self.waiting is not None:
            self._begin(builder)
            builder.arguments_delta(self.waiting)
            self.waiting = None

    def _begin(self, builder: EventBuilder) -> None:
        if not self.told and self.name is not None:
            self.told = True
            builder.start_call(self.name, self.call_id)

    def _arguments(self, raw: str, builder: EventBuilder) -> None:
        """Emit arguments that were not emitted as they came."""
        inner = text_of(raw)
        if raw == "null":
            raw = ""
        elif inner is not None and (found := mended_object(inner)) is not None:
            raw = found  # an object written as a string: what the model meant
        if self.name is None:
            self.waiting = raw
        else:
            self._begin(builder)
            builder.arguments_delta(raw)

    def _finish(self, keys: CallKeys, builder: EventBuilder) -> None:
        """Complete the object."""
        if keys.strict and self.name is not None and builder.declares(self.name, surely=True):
            self._begin(builder)
        if self.told:
            builder.end_call()


def text_of(raw: str) -> str | None:
    """Return the text of a JSON string, or None if `raw` is not one."""
    try:
        value = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
