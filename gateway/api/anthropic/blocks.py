"""The content blocks of an answer, for streams and complete messages alike.

`ContentBlocks` turns the parser's events into blocks:

    thinking   consecutive reasoning    ends with a signature
    text       consecutive content
    tool_use   one tool call            its deltas, joined, are the JSON text of an object

A block ends when an event of another kind arrives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Literal, Protocol

from gateway.api.anthropic.signature import MAX_SEALED_BYTES, BlockSignature
from gateway.formats.event_builder import INVALID_ARGUMENTS
from gateway.formats.events import (
    INVALID_JSON,
    Content,
    Event,
    Failed,
    Finished,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
)
from gateway.formats.readable_json import MAX_NUMBER_CHARS, is_too_large

BlockKind = Literal["text", "thinking", "tool_use"]
NOT_KEPT = "thinking_not_kept"
"""Code of the warning that a signature does not hold the text of its block."""


class BlockSink(Protocol):
    """Receives one block at a time: `start`, any number of `block_delta`s, `stop`. `call` is set
    for a tool_use block only, and `signature` for a thinking block only."""

    def start(self, index: int, kind: BlockKind, call: ToolCall | None) -> None: ...
    def block_delta(self, text: str) -> None: ...
    def stop(self, signature: str | None) -> None: ...


class ContentBlocks:
    """Turns the events of one answer into calls of a `BlockSink`. If `shows_thinking` is false,
    thinking blocks have no text, and a signature that holds it."""

    def __init__(self, sink: BlockSink, *, shows_thinking: bool = True) -> None:
        #: The warnings of the parser and of this class, so far.
        self.warnings: list[OutputWarning] = []
        #: The Finished event, once it has arrived.
        self.finished: Finished | None = None
        self._sink = sink
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: BlockKind | None = None
        self._input = ToolInput()
        self._signature = self._new_signature()

    def push(self, event: Event) -> None:
        match event:
            case Content(text):
                if self._open != "text":
                    self._start("text")
                self._sink.block_delta(text)
            case Reasoning(text):
                self._push_reasoning(text)
            case ToolCall():
                self._start("tool_use", event)
                self._input = ToolInput()
            case ToolArguments(_, fragment):
                self._push_arguments(self._input.push(fragment))
            case ToolCallEnd():
                self._stop_call(complete=True)
            case OutputWarning():
                self.warnings.append(event)
            case Finished():
                self._stop()
                self.finished = event
            case Failed():  # the owner of the sink reports it
                pass

    def _push_reasoning(self, text: str) -> None:
        if self._open != "thinking":
            self._start("thinking")
            self._signature = self._new_signature()
        self._signature.push(text)
        if self._shows_thinking:
            self._sink.block_delta(text)

    def _new_signature(self) -> BlockSignature:
        return BlockSignature(seals=not self._shows_thinking)

    def _start(self, kind: BlockKind, call: ToolCall | None = None) -> None:
        self._stop()
        self._index += 1
        self._open = kind
        self._sink.start(self._index, kind, call)

    def _push_arguments(self, text: str) -> None:
        if text:
            self._sink.block_delta(text)

    def _stop(self) -> None:
        if self._open == "tool_use":
            self._stop_call(complete=False)
        elif self._open is not None:
            signature = self._finish_signature() if self._open == "thinking" else None
            self._open = None
            self._sink.stop(signature)

    def _finish_signature(self) -> str:
        if self._signature.is_too_long:
            problem = f"its text has more than {MAX_SEALED_BYTES:,} bytes"
            message = f"content[{self._index}].signature: does not hold the thinking, as {problem}"
            self.warnings.append(OutputWarning(NOT_KEPT, message))
        return self._signature.finish()

    def _stop_call(self, *, complete: bool) -> None:
        self._push_arguments(self._input.finish(complete=complete))
        if self._input.is_broken:
            self._warn_broken()
        self._open = None
        self._sink.stop(None)

    def _warn_broken(self) -> None:
        """Warn about invalid arguments, unless the parser did so already."""
        if not self.warnings or self.warnings[-1].code != INVALID_ARGUMENTS:
            problem = f"the model did not write a JSON object; its text is in `{INVALID_JSON}`"
            at = f"content[{self._index}].input"
            self.warnings.append(OutputWarning(INVALID_ARGUMENTS, f"{at}: {problem}"))


# ---- the input of a tool_use block

_RUN = re.compile(r'[^"\\\x00-\x1f]++')
_ESCAPE = re.compile(
    r"\\(?:[\"\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
MAX_ESCAPE_CHARS = 12
_BLANKS = re.compile(r"[ \t\r\n]++")
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]++")
_COMPLETE_SCALAR = re.compile(
    r"(?:true|false|null|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)"
)


START, FIRST_KEY, KEY, COLON, VALUE, FIRST_VALUE, AFTER, STRING, KEY_STRING, DONE = (
    *("start", "first key", "key", "colon", "value", "first value", "after"),
    *("string", "key string", "done"),
)
"""States: the expected token, or the kind of string being read."""

_BRACKETS: Mapping[str, tuple[str, str]] = {"{": ("}", FIRST_KEY), "[": ("]", FIRST_VALUE)}
"""Opening bracket -> (closing bracket, state after the opening one)."""
_NEXT: Mapping[tuple[str, str], str] = {
    (START, "{"): FIRST_KEY,
    (FIRST_KEY, '"'): KEY_STRING,
    (FIRST_KEY, "}"): AFTER,
    (KEY, '"'): KEY_STRING,
    (COLON, ":"): VALUE,
    (VALUE, '"'): STRING,
    (VALUE, "{"): FIRST_KEY,
    (VALUE, "["): FIRST_VALUE,
    (VALUE, "scalar"): AFTER,
    (FIRST_VALUE, '"'): STRING,
    (FIRST_VALUE, "{"): FIRST_KEY,
    (FIRST_VALUE, "["): FIRST_VALUE,
    (FIRST_VALUE, "]"): AFTER,
    (FIRST_VALUE, "scalar"): AFTER,
    (AFTER, ","): KEY,  # in an object; in an array a value
    (AFTER, "}"): AFTER,
    (AFTER, "]"): AFTER,
}
"""(state, token) -> next state. A missing row is invalid JSON."""


class ToolInput:
    """Turns the streamed arguments of one call into the JSON text of an object.

    Clients expect `input` to be an object. SDKs parse it incrementally and fail on invalid JSON. So
    the emitted text always becomes valid JSON if an open string and all open brackets are closed.
    Text that would break this rule, such as a key without a value, is held back.

    - Raw control characters in strings are escaped.
    - If a call is cut off, the object is closed.
    - If the model writes invalid JSON, the object is closed with one more member, `INVALID_JSON`,
      which contains the model's whole text. The name of this member is Anthropic's.

    The concatenated output does not depend on how the input was split.
    """

    def __init__(self) -> None:
        #: Whether the model wrote something other than a JSON object. `push` then emits nothing.
        self.is_broken = False
        self._at = START
        self._closers: list[str] = []
        self._raw: list[str] = []
        self._rest = ""  # an incomplete token
        #: Tokens that are not emitted yet, because closing brackets could not follow them.
        self._held: list[str] = []
        self._has_member = False

    def push(self, text: str) -> str:
        """Read more of the model's text. Return the text to emit."""
        self._raw.append(text)
        if self.is_broken:
            return ""
        emitted: list[str] = []
        text, self._rest = self._rest + text, ""
        position = 0
        while position < len(text) and not self.is_broken:
            end = self._token(text, position, emitted)
            if end == position:  # the token is not complete
                self._rest = text[position:]
                break
            position = end
        return "".join(emitted)

    def finish(self, *, complete: bool) -> str:
        """Return the rest of the object's text.

        complete  whether the model finished the call; otherwise the call was cut off
        """
        if complete and (self._at != DONE or self._rest):
            self.is_broken = True
        if self._at == DONE and not self.is_broken:
            return "".join(self._held).rstrip()
        end = "{" if self._at == START else '"' if self._at == STRING else ""
        end += "".join(reversed(self._closers[1:]))
        if self.is_broken:
            member = json.dumps({INVALID_JSON: "".join(self._raw)}, ensure_ascii=False)[1:-1]
            end += ("," if self._has_member else "") + member
        return end + "}"

    # ---- tokens

    def _token(self, text: str, position: int, emitted: list[str]) -> int:
        """Read the token at `position`. Return its end, or `position` if the token is
        incomplete."""
        if self._at in (STRING, KEY_STRING):
            return self._in_string(text, position, emitted)
        if blanks := _BLANKS.match(text, position):
            self._held.append(blanks[0])
            return blanks.end()
        scalar = _SCALAR.match(text, position)
        if scalar is None:
            self._structural(text[position], emitted)
            return position + 1
        if scalar.end() == len(text) and len(scalar[0]) <= MAX_NUMBER_CHARS:
            return position
        self._scalar(scalar[0], emitted)
        return scalar.end()

    def _in_string(self, text: str, position: int, emitted: list[str]) -> int:
        if run := _RUN.match(text, position):
            self._within(run[0], emitted)
            return run.end()
        char = text[position]
        if char == '"':
            self._within(char, emitted)
            self._at = COLON if self._at == KEY_STRING else AFTER
        elif char != "\\":
            self._within(json.dumps(char)[1:-1], emitted)
        elif escape := _ESCAPE.match(text, position):
            self._within(escape[0], emitted)
            return escape.end()
        elif len(text) - position < MAX_ESCAPE_CHARS:
            return position
        else:
            self.is_broken = True
        return position + 1

    def _within(self, text: str, emitted: list[str]) -> None:
        """Emit text inside a string value. Hold back text inside a key, because an object cannot
        be closed directly after a key."""
        if self._at == STRING:
            emitted.append(text)
        else:
            self._held.append(text)

    def _scalar(self, text: str, emitted: list[str]) -> None:
        next_state = _NEXT.get((self._at, "scalar"))
        is_whole = _COMPLETE_SCALAR.fullmatch(text)
        if next_state is None or not is_whole or (text[-1].isdigit() and is_too_large(text)):
            self.is_broken = True
        else:
            self._at = next_state
            self._emit(text, emitted)

    def _structural(self, char: str, emitted: list[str]) -> None:
        next_state = _NEXT.get((self._at, char))
        if next_state is None or (char in "}]" and self._closers[-1] != char):
            self.is_broken = True
            return
        self._at = next_state
        if char in _BRACKETS:
            self._closers.append(_BRACKETS[char][0])
            self._emit(char, emitted)
        elif char in "}]":
            self._close(char, emitted)
        elif next_state == STRING:
            self._emit(char, emitted)
        else:
            if char == "," and self._closers[-1] == "]":
                self._at = VALUE
            self._held.append(char)

    def _close(self, char: str, emitted: list[str]) -> None:
        """Emit a closing bracket. The outermost one is held back, because invalid text may
        follow."""
        self._closers.pop()
        if self._closers:
            self._emit(char, emitted)
        else:
            self._at = DONE
            self._held.append(char)

    def _emit(self, text: str, emitted: list[str]) -> None:
        """Append the held tokens and `text` to `emitted`."""
        emitted.extend(self._held)
        emitted.append(text)
        self._held.clear()
        self._has_member = self._has_member or self._at != FIRST_KEY or len(self._closers) > 1
