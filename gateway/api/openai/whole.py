"""Encodes a complete response: the stream, folded into one JSON object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.api.openai.message import MessageBuilder, message_of, warning_of
from gateway.api.openai.response_builder import (
    OpenAIEnvelope,
    ResponseBuilder,
    concatenated,
    encode,
    usage_of,
)
from gateway.formats.events import OutputDelta
from gateway.generation.choice import Choice
from gateway.generation.group import ChoiceGroup
from gateway.generation.sinks import CollectSink
from gateway.observe.timings import told_timings


def whole_response(
    group: ChoiceGroup,
    collected: CollectSink,
    builder: ResponseBuilder,
    envelope: OpenAIEnvelope,
    *,
    includes_ids: bool = False,
    prompt_logprobs: Callable[[Choice], list[Any] | None] | None = None,
) -> bytes:
    """Return the body of a 200 for a group that ended without an error.

    collected        the output of each choice
    includes_ids     add the token ids of prompt and answer
    prompt_logprobs  formats a choice's prompt logprobs; None omits them
    """
    warnings = [warning_of(warning, None) for warning in envelope.warnings]
    choices: list[dict[str, Any]] = []
    top_members: dict[str, Any] = {}
    for choice in group.choices:
        delta = collected.whole[choice.index]
        message = message_of(delta.events)
        json = _choice(choice, message, delta, builder)
        prompt_members = {
            "prompt_token_ids": choice.ask.prompt_ids if includes_ids else None,
            "prompt_logprobs": prompt_logprobs(choice) if prompt_logprobs else None,
        }
        if includes_ids:
            json["token_ids"] = delta.token_ids
        if builder.prompt_ids_on_top:
            top_members = top_members or prompt_members
        else:
            json |= prompt_members
        choices.append(json)
        warnings += [warning_of(warning, choice.index) for warning in message.warnings]
    body = envelope.fields(builder.kind, builder.constants)
    body |= {"choices": choices, "usage": usage_of(group)}
    if warnings:
        body["warnings"] = warnings
    return encode(body | top_members | envelope.extensions | told_timings(group))


def _choice(
    choice: Choice, message: MessageBuilder, delta: OutputDelta, builder: ResponseBuilder
) -> dict[str, Any]:
    logprobs = [builder.echo_logprobs(choice), builder.logprobs(choice, delta)]
    return {
        "index": choice.index,
        **builder.whole(choice, message),
        "logprobs": concatenated(logprobs),
        "finish_reason": message.end.reason,
        "stop_reason": message.end.stop_reason,
    }
