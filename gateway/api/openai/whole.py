"""Encodes a complete response: the stream, folded into one JSON object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.api.openai.message import MessageBuilder, message_of, warning_of
from gateway.api.openai.response_builder import (
    OpenAIEnvelope,
    ResponseBuilder,
    encode,
    joined,
    usage_of,
)
from gateway.formats.events import OutputDelta
from gateway.generation.choice import Choice
from gateway.generation.group import ChoiceGroup
from gateway.generation.sinks import CollectSink
from gateway.observe.timings import told_timings


def whole_response(
    answer: ChoiceGroup,
    fold: CollectSink,
    dialect: ResponseBuilder,
    origin: OpenAIEnvelope,
    *,
    tells_ids: bool = False,
    prompt_logprobs: Callable[[Choice], list[Any] | None] | None = None,
) -> bytes:
    """Return the body of a 200 for a group that ended without an error.

    collected        the output of each choice
    includes_ids     add the token ids of prompt and answer
    prompt_logprobs  formats a choice's prompt logprobs; None omits them
    """
    warnings = [warning_of(warning, None) for warning in origin.warnings]
    choices: list[dict[str, Any]] = []
    beside: dict[str, Any] = {}
    for choice in answer.choices:
        delta = fold.whole[choice.index]
        message = message_of(delta.events)
        told = _choice(choice, message, delta, dialect)
        of_prompt = {
            "prompt_token_ids": choice.ask.prompt_ids if tells_ids else None,
            "prompt_logprobs": prompt_logprobs(choice) if prompt_logprobs else None,
        }
        if tells_ids:
            told["token_ids"] = delta.token_ids
        if dialect.prompt_ids_on_top:
            beside = beside or of_prompt
        else:
            told |= of_prompt
        choices.append(told)
        warnings += [warning_of(warning, choice.index) for warning in message.warnings]
    body = origin.fields(dialect.kind, dialect.constants)
    body |= {"choices": choices, "usage": usage_of(answer)}
    if warnings:
        body["warnings"] = warnings
    return encode(body | beside | origin.asides | told_timings(answer))


def _choice(
    choice: Choice, message: MessageBuilder, delta: OutputDelta, dialect: ResponseBuilder
) -> dict[str, Any]:
    logprobs = [dialect.echo_logprobs(choice), dialect.logprobs(choice, delta)]
    return {
        "index": choice.index,
        **dialect.whole(choice, message),
        "logprobs": joined(logprobs),
        "finish_reason": message.end.reason,
        "stop_reason": message.end.stop_reason,
    }
