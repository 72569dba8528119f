"""What is asked of an engine and how its answer is read, before anything has been sent.

Every route makes Asks; `Answer` (group.py) sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from gateway.formats.events import OutputDelta, OutputWarning
from gateway.generation.reasoning_tokens import ThinkingMeter
from protocol.grammar import Grammar
from protocol.messages import Output
from protocol.sampling import SamplingParams

NOT_CALLED = "tool_choice_not_followed"


class OutputParser(Protocol):
    """One choice, read. What is pushed after the end changes nothing.

    may_stop  what it says may end it, at any of its tokens
    """

    @property
    def may_stop(self) -> bool: ...
    def push(self, output: Output) -> OutputDelta: ...


class OutputParserFactory(Protocol):
    """What the choices of a prompt share. Makes one reader for each."""

    def new(self) -> OutputParser: ...


class ToolChoiceCheck(msgspec.Struct, frozen=True):
    """The answer has to call a tool: the one of this name, or any."""

    name: str | None = None

    def unmet(self, called: Sequence[str]) -> OutputWarning | None:
        """What to say of an answer that has ended by itself, and has called these."""
        if self.name is None and not called:
            return OutputWarning(NOT_CALLED, "a tool call was required, and the model made none")
        if self.name is not None and set(called) != {self.name}:
            return OutputWarning(NOT_CALLED, f"the model did not call {self.name!r} alone")
        return None


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """What one prompt needs: its tokens, the parameters of each of its choices, how they are read.

    new_meter  makes what counts the tokens of reasoning, where they can be counted
    demand     what the answer has to be, even where nothing forces it to
    grammar    what the engine lets it be
    kv_readers, kv_handle   see messages.Generate; with readers there is no answer but a handle
    """

    prompt_ids: list[int]
    choices: list[SamplingParams]
    readers: OutputParserFactory
    new_meter: Callable[[], ThinkingMeter] | None = None
    demand: ToolChoiceCheck | None = None
    grammar: Grammar | None = None
    kv_readers: int = 0
    kv_handle: str = ""
