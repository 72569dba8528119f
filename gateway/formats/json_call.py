"""Reads JSON values of a stream in linear time: where a value ends, and which call an object is.

`JsonExtent` finds the end of a JSON value. `CallScan` reads an object that is a call, and finds its
name and its arguments in any order. Arguments are emitted unchanged as they arrive. Arguments that
come before the name are held back until the name is known. All state is plain data.
"""

from __future__ import annotations

import json
import re

import msgspec

from gateway.formats.event_builder import EventBuilder
from gateway.formats.json_scanner import Status, object_scan
from gateway.formats.json_spelling import PLAIN, SPACE
from gateway.text.markers import match_end

# ---- the end of a value

IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
STRUCTURE = re.compile(r"[^\s0-9A-Za-z+\-.,:]")
SCALAR_END = re.compile(r"[^0-9A-Za-z+\-.]")


class JsonExtent(msgspec.Struct):
    """An incremental search for the end of one JSON value, valid or not.

    A new search expects the value, perhaps after blanks. Strings, escapes and depth are tracked, so
    nothing inside a string ends the value. The search stops at a character that JSON does not allow
    outside strings.

    kind     "" before the value, then "nested", "string" or "scalar"
    depth    number of open brackets
    quoted   whether the position is inside a string
    escaped  whether the text so far ends with a backslash that starts an escape
    """

    kind: str = ""
    depth: int = 0
    quoted: bool = False
    escaped: bool = False

    def scan(self, text: str, position: int = 0) -> tuple[int, Status]:
        """Continue at `position`. Return (the position reached, the status).

        At the end of a string or a bracketed value, the position is that after its last character.
        A scalar ends at the first character that cannot belong to it. If the value is broken, the
        position is that of the character that breaks it.
        """
        if not self.kind and position < len(text):
            char = text[position]
            self.kind = {'"': "string", "{": "nested", "[": "nested"}.get(char, "scalar")
        if self.kind == "scalar":
            found = SCALAR_END.search(text, position)
            return (found.start(), "end") if found else (len(text), "more")
        end = len(text)
        while position < end:
            if self.quoted:
                position = self._in_string(text, position)
            else:
                found = STRUCTURE.search(text, position)
                if found is None:
                    break
                char, position = found[0], found.end()
                if char == '"':
                    self.quoted = True
                    continue
                if char in "{[":
                    self.depth += 1
                elif char in "}]":
                    self.depth -= 1
                else:
                    return position - 1, "broken"
            if not (self.quoted or self.depth):
                return position, "end"
        return end, "more"

    def _in_string(self, text: str, position: int) -> int:
        """Read to the end of the string or of the text. Return the position reached."""
        found = IN_STRING.match(text, position + self.escaped)
        assert found is not None
        position, self.escaped = found.end(), False
        if position == len(text):
            return position
        self.quoted = text[position] != '"'
        self.escaped = self.quoted  # a string that has not ended ends with a backslash here
        return position + 1


# ---- a call


class CallKeys(msgspec.Struct, frozen=True):
    """The keys of an object that is a call. If a key has several spellings, grammars write the
    first.

    name         keys of the tool's name. If the value is an object instead of a string, that object
                 has the call's keys
    arguments    keys of the arguments
    id           keys of the call's id, which is used only if it comes before the name
    name_is_key  whether each key is a tool's name, and its value the arguments
    strict       for calls without markers: an object with any other key (except `also`) is not a
                 call, and a name without arguments is a call only if the request declares a tool of
                 that name
    also         further keys that a strict call may have
    """

    name: tuple[str, ...] = ("name", "function")
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: tuple[str, ...] = ()
    name_is_key: bool = False
    strict: bool = False
    also: tuple[str, ...] = ("type", "id")

    def role(self, key: str) -> str:
        """Return the meaning of the key `key` in a call: "arguments", "name", "id" or "other"."""
        if self.name_is_key or key in self.arguments:
            return "arguments"
        if key in self.name:
            return "name"
        return "id" if key in self.id else "other"


class CallScan(msgspec.Struct):
    """An incremental reader of one object that is a call. A new reader expects `{`.

    phase          "open" before the object, "key" before a key or the end, "in_key", "colon",
                   "value" before a value, "in_value", "end"
    role           meaning of the current key; "again" for a second name or second arguments
    value          scan of the current key or value
    parts          text of the current key or value so far
    streams        whether the current value is arguments that are emitted as they arrive
    nested         number of open objects that contain the current key
    started        whether the start of the call has been emitted
    has_arguments  whether a key of the arguments has been read
    name, call_id  the call's name and id, once they are known
    waiting        arguments that came before the name
    """

    phase: str = "open"
    role: str = ""
    value: JsonExtent = msgspec.field(default_factory=JsonExtent)
    parts: list[str] = []
    streams: bool = False
    nested: int = 0
    started: bool = False
    has_arguments: bool = False
    name: str | None = None
    call_id: str | None = None
    waiting: str | None = None

    @property
    def quoted(self) -> bool:
        """Whether the position is inside a string."""
        return self.value.quoted

    def passes(self, text: str) -> bool:
        """Return whether `scan` would emit `text` unchanged and change no state, because `text`
        only continues a string inside arguments that are emitted as they arrive."""
        value = self.value
        return (
            self.streams
            and value.quoted
            and not value.escaped
            and self.phase == "in_value"
            and PLAIN.fullmatch(text) is not None
        )

    def scan(self, text: str, keys: CallKeys, builder: EventBuilder) -> tuple[int, Status]:
        """Read `text`, and emit the call's events to `builder`. Return (the position reached, the
        status).

        The status is "end" after the object's closing brace. If the object is a call, all of
        it has then been emitted, with its end; otherwise nothing has been emitted.
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
        """Read one character between keys and values. Return whether it is allowed there."""
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
        self.phase, self.value, self.parts = "in_value", JsonExtent(), []
        self.streams = char == "{" and self.role == "arguments" and self.name is not None
        if self.streams:
            self._begin(builder)
        return char not in ",:}]"

    def _expect_key(self, char: str) -> bool:
        if char == '"':
            self.phase, self.value, self.parts, self.streams = "in_key", JsonExtent(), [], False
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
        if self.streams:
            builder.arguments_delta(text[start:position])
        else:
            self.parts.append(text[start:position])
        if status == "end" and not self._complete(keys, builder):
            return position, "broken"
        return position, status

    def _complete(self, keys: CallKeys, builder: EventBuilder) -> bool:
        """Handle a complete key or value. Return whether it is valid."""
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
            case "arguments" if not self.streams:
                self._arguments(raw, builder)
        return True

    def _key(self, key: str | None, keys: CallKeys, builder: EventBuilder) -> bool:
        if key is None:
            return False
        self.phase, self.role = "colon", keys.role(key)
        if keys.name_is_key:
            self._finish(keys, builder)
            self.started = self.has_arguments = False
            self._named(key, keys, builder)
        elif self.role == "name" and self.name is not None:
            self.role = "again"
        elif self.role == "arguments":
            self.role, self.has_arguments = "again" if self.has_arguments else self.role, True
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
        if not self.started and self.name is not None:
            self.started = True
            builder.start_call(self.name, self.call_id)

    def _arguments(self, raw: str, builder: EventBuilder) -> None:
        """Handle arguments that were not emitted as they arrived."""
        inner = text_of(raw)
        if raw == "null":
            raw = ""
        elif inner is not None and (found := repaired_object(inner)) is not None:
            raw = found  # an object that the model wrote as a string
        if self.name is None:
            self.waiting = raw
        else:
            self._begin(builder)
            builder.arguments_delta(raw)

    def _finish(self, keys: CallKeys, builder: EventBuilder) -> None:
        """End the call if it has started. If the keys are strict, a declared tool's name starts a
        call even without arguments."""
        if keys.strict and self.name is not None and builder.declares(self.name, surely=True):
            self._begin(builder)
        if self.started:
            builder.end_call()


def text_of(raw: str) -> str | None:
    """Return the text of a JSON string, or None if `raw` is not a JSON string. Half of a surrogate
    pair becomes U+FFFD, because text with half a pair cannot be sent."""
    try:
        value = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, str):
        return None
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def repaired_object(text: str) -> str | None:
    """Return `text` as a JSON object, with the repairs that `json_scanner` describes. Return None
    if these repairs do not make it one."""
    scan = object_scan()
    repaired = scan.push(text) + scan.finish()
    return repaired if scan.is_object else None
