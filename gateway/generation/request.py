"""A prompt with its parameters and its output parser, before anything is sent.

Every route creates `PromptRequest`s; `ChoiceGroup` sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from gateway.formats.events import OutputDelta, OutputWarning
from gateway.generation.reasoning_tokens import ReasoningCounter
from protocol.grammar import Grammar
from protocol.messages import Output
from protocol.sampling import SamplingParams

NOT_CALLED = "tool_choice_not_followed"


class OutputParser(Protocol):
    """Parses the output of one choice. Output after the end is ignored."""

    @property
    def may_stop(self) -> bool:
        """Whether the text may end the choice at any token, because of a stop string."""

    def push(self, output: Output) -> OutputDelta: ...


class OutputParserFactory(Protocol):
    """Creates the parser of each choice of a prompt."""

    def new(self) -> OutputParser: ...


class ToolChoiceCheck(msgspec.Struct, frozen=True):
    """Checks that the answer calls a tool: the one with this name, or any."""

    name: str | None = None

    def unmet(self, called: Sequence[str]) -> OutputWarning | None:
        """Return a warning if an answer that called these tools does not follow `tool_choice`."""
        if self.name is None and not called:
            return OutputWarning(NOT_CALLED, "a tool call was required, and the model made none")
        if self.name is not None and set(called) != {self.name}:
            return OutputWarning(NOT_CALLED, f"the model did not call only {self.name!r}")
        return None


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt, and the parameters of each of its choices."""

    prompt_ids: list[int]
    choices: list[SamplingParams]
    parser_factory: OutputParserFactory
    #: Creates the counter of reasoning tokens; None if they cannot be counted.
    new_reasoning_counter: Callable[[], ReasoningCounter] | None = None
    #: The tool calls that the answer must contain; a mismatch adds a warning.
    tool_choice_check: ToolChoiceCheck | None = None
    #: The grammar that the engine enforces.
    grammar: Grammar | None = None
    #: See messages.Generate. With readers, the answer has a handle and no tokens.
    kv_readers: int = 0
    kv_handle: str = ""
