"""Turns events into content blocks, for streams and complete responses alike.

    thinking   consecutive reasoning    ends with a signature
    text       consecutive content
    tool_use   one call                 its deltas add up to the JSON text of an object

A block ends when an event of another kind arrives. Each call is one block.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Literal, Protocol

from gateway.api.anthropic.tool_input import INVALID_JSON, ToolInput
from gateway.formats.event_builder import INVALID_ARGUMENTS
from gateway.formats.events import (
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

BlockKind = Literal["text", "thinking", "tool_use"]
SIGNATURE_BYTES = 32


class BlockSink(Protocol):
    """Receives one block at a time: `start`, any number of `block_delta`s, `stop`."""

    def start(self, index: int, kind: BlockKind, call: ToolCall | None) -> None: ...
    def block_delta(self, text: str) -> None: ...
    def stop(self, signature: str | None) -> None: ...


class ContentBlocks:
    """The content blocks of one answer.

    shows_thinking  emit the text of thinking blocks, not only their start and signature
    warnings        warnings so far, including those of this class
    finished        the Finished event, once it has arrived
    """

    def __init__(self, sink: BlockSink, *, shows_thinking: bool = True) -> None:
        self.warnings: list[OutputWarning] = []
        self.finished: Finished | None = None
        self._sink = sink
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: BlockKind | None = None
        self._input = ToolInput()
        self._digest = new_digest()

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
            self._digest = new_digest()
        self._digest.update(text.encode("utf-8", "surrogatepass"))
        if self._shows_thinking:
            self._sink.block_delta(text)

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
            signature = signature_of(self._digest) if self._open == "thinking" else None
            self._open = None
            self._sink.stop(signature)

    def _stop_call(self, *, complete: bool) -> None:
        self._push_arguments(self._input.finish(complete=complete))
        if self._input.is_broken:
            self._warn_broken()
        self._open = None
        self._sink.stop(None)

    def _warn_broken(self) -> None:
        """Warn about invalid arguments, unless the parser did so already. The parser does not warn
        about lone surrogates, which JSON can express and UTF-8 cannot."""
        if not self.warnings or self.warnings[-1].code != INVALID_ARGUMENTS:
            problem = f"the model did not write a JSON object; its text is in `{INVALID_JSON}`"
            at = f"content[{self._index}].input"
            self.warnings.append(OutputWarning(INVALID_ARGUMENTS, f"{at}: {problem}"))


def new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=SIGNATURE_BYTES, person=b"tidegate")


def signature_of(digest: hashlib.blake2b) -> str:
    """Return a digest of the thinking text. It proves nothing and is never checked. Clients drop
    thinking blocks without a signature."""
    return base64.b64encode(digest.digest()).decode()
