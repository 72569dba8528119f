"""Answers that are messages, each with a header that names its recipient: harmony and Muse.

    <|channel|>analysis<|message|>Thinking.<|end|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>Hello.<|return|>

`harmony_parser` reads such answers.

The grammar starts after the part of the first header that the prompt has written. The marker that
ends the last message may also be the token that ends the answer, which no grammar includes. So that
marker is always optional.

Sources: OpenAI's description of harmony; the response template of Muse's checkpoint.
"""

from __future__ import annotations

from gateway.formats.answer_parser import AnswerSyntax
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar_builder import (
    ANY_TEXT,
    AnswerFrame,
    GrammarBuilder,
    either,
    optional,
    sequence,
)
from gateway.formats.harmony_header import FUNCTIONS, ROLE
from gateway.formats.harmony_parser import HarmonyParser
from gateway.formats.xml_parameters import MUSE_CALLS, XmlParameters
from protocol.engine.grammar import Form, Repeat, Until


class Harmony(AnswerSyntax, frozen=True, kw_only=True):
    """One model family's spelling of answers as messages: its markers and names."""

    PARSER = HarmonyParser

    #: Marker that starts a message and its header.
    start: str = "<|start|>"
    #: Marker that ends the header.
    message: str = "<|message|>"
    #: Markers that end a message.
    ends: tuple[str, ...]
    #: Markers that may occur in a header.
    in_header: tuple[str, ...] = ()
    #: The marker of `in_header` that names a channel. If empty, recipients alone decide.
    channel: str = ""
    #: Name of the channel or recipient of reasoning.
    reasoning: str
    #: Recipients that mean the user.
    user: tuple[str, ...] = ()
    #: Syntax of messages for tools. None: their body is the JSON of the arguments.
    calls: XmlParameters | None = None
    #: Channels of content, the first for the answer proper. Only the grammar uses it.
    content_channels: tuple[str, ...] = ()
    #: Name of the channel of calls. Only the grammar uses it.
    call_channel: str = ""
    #: The marker of `ends` that ends a call. Only the grammar uses it.
    call_end: str = ""

    @property
    def channels(self) -> tuple[str, ...]:
        return (self.reasoning, *self.content_channels) if self.channel else ()

    def signs(self) -> tuple[str, ...]:
        """Markup of calls that has no meaning in a message to the user."""
        return (*self.calls.openers(), *self.calls.tags()) if self.calls else self.in_header

    def markers(self) -> tuple[str, ...]:
        calls = self.calls.markers() if self.calls else ()
        return (self.start, self.message, *self.ends, *self.in_header, *calls)

    # ---- the grammar

    def frame(self) -> AnswerFrame:
        return AnswerFrame(
            opens=self._head(self.reasoning),
            closes=self.ends[0] + self.start + ROLE,
            before=self._content_heads()[0],
        )

    def write_required(self, grammar: GrammarBuilder) -> Form:
        if self.calls is None:
            call = grammar.call_rule(lambda tool: self._write_json_call(tool, grammar))
            calls = grammar.several(call, self.call_end + self.start + ROLE)
            return sequence(calls, optional(sequence(self.call_end)))
        opener = self.calls.openers()[0]
        stretch = self.calls.write_calls(opener, grammar)
        recipient = grammar.each_tool(lambda tool: sequence(tool.name))
        head = sequence(" to=", recipient, self.message + opener)
        return sequence(head, stretch, optional(sequence(self.ends[0])))

    def write_strict(self, grammar: GrammarBuilder) -> Form:
        """Return the grammar of any messages. The last one is a message to the user, or calls."""
        ends = [end for end in self.ends if end != self.call_end]
        heads = either(map(sequence, (self._head(self.reasoning), *self._content_heads())))
        others = Repeat(sequence(heads, either(map(Until, ends)), self.start + ROLE))
        last = optional(either(map(sequence, ends)))
        answer = sequence(either(map(sequence, self._content_heads())), ANY_TEXT, last)
        calls = grammar.rule("calls", self.write_required(grammar))
        return sequence(others, either((answer, calls)))

    def _write_json_call(self, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
        """Return the grammar of one call. The recipient may come before or after the channel."""
        recipient, channel = f" to={FUNCTIONS}{tool.name}", self.channel + self.call_channel
        head = either(map(sequence, (channel + recipient, recipient + channel)))
        kind = optional(sequence(self.in_header[-1]))
        return sequence(head, " ", kind, "json" + self.message, grammar.arguments(tool))

    def _content_heads(self) -> tuple[str, ...]:
        """Return the headers of messages to the user; the first is that of the answer proper."""
        return tuple(self._head(name) for name in self.content_channels or self.user)

    def _head(self, name: str) -> str:
        return (self.channel or " to=") + name + self.message


MUSE = Harmony(ends=("<|eom|>", "<|eot|>"), reasoning="self", user=("user",), calls=MUSE_CALLS)

FORMATS = {
    "openai": Harmony(
        ends=("<|end|>", "<|return|>", "<|call|>"),
        in_header=("<|channel|>", "<|constrain|>"),
        channel="<|channel|>",
        reasoning="analysis",
        user=("user", "assistant"),
        content_channels=("final", "commentary"),
        call_channel="commentary",
        call_end="<|call|>",
    ),
    "muse_glimmer": MUSE,
    "muse": MUSE,
}
