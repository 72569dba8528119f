"""Reads an object that is a call: finds its name and its arguments, in any order, in linear time.

Arguments are emitted byte for byte as they come; those before the name wait for it. The state is
plain data.
"""

from __future__ import annotations

import json

import msgspec

from gateway.formats.event_builder import EventBuilder
from gateway.formats.json_scanner import PLAIN, SPACE, JsonExtent, Status, mended_object
from gateway.text.markers import match_end


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
    """Position in a call's object; fresh before the `{`.

    phase          "open" before the object, "key" before a key or the end, "in_key", "colon",
                   "value" before a value, "in_value", "end"
    role           role of the current key
    value          position in the current key or value, and `parts`: its text so far
    streams        the current value is the arguments, and is emitted as it comes
    nested         number of objects that are open around the keys
    started        the call has been emitted
    has_arguments  a key of the arguments has been read
    name, call_id  as far as they are known
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
        """Return whether `text` only continues a string in arguments that are emitted as they come.

        Then `scan` would emit it and change no state.
        """
        value = self.value
        return (
            self.streams
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
        """End the call, if it has started. With strict keys, the name of a declared tool is enough
        to start it."""
        if keys.strict and self.name is not None and builder.declares(self.name, surely=True):
            self._begin(builder)
        if self.started:
            builder.end_call()


def text_of(raw: str) -> str | None:
    """Return the text of a JSON string, or None if `raw` is not one.

    Half of a surrogate pair becomes U+FFFD: no text with it can be sent.
    """
    try:
        value = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, str):
        return None
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
