"""A whole answer: the stream, folded into one JSON object."""

from __future__ import annotations

from typing import Any

from gateway.answering import Answer, Choice, Fold
from gateway.openai.shapes import Dialect, Origin, encode, joined, usage_of
from gateway.output.events import Content, Delta, Finished, merged


def whole_response(
    answer: Answer, fold: Fold, dialect: Dialect, origin: Origin, *, tells_ids: bool = False
) -> bytes:
    """The body of a 200. `answer` has ended well, and `fold` has heard all of it."""
    choices = [
        _choice(choice, fold.whole[choice.index], dialect, tells_ids=tells_ids)
        for choice in answer.choices
    ]
    body = origin.fields(dialect.kind) | {"choices": choices, "usage": usage_of(answer)}
    if tells_ids and dialect.prompt_ids_on_top:
        body["prompt_token_ids"] = answer.asks[0].prompt_ids
    return encode(body)


def _choice(choice: Choice, delta: Delta, dialect: Dialect, *, tells_ids: bool) -> dict[str, Any]:
    events = merged(delta.events)
    text = "".join(event.text for event in events if isinstance(event, Content))
    end = events[-1]
    assert isinstance(end, Finished)
    logprobs = [dialect.echo_logprobs(choice), dialect.logprobs(choice, delta)]
    result = {
        "index": choice.index,
        **dialect.whole(choice, text),
        "logprobs": joined(logprobs),
        "finish_reason": end.reason,
        "stop_reason": end.stop_reason,
    }
    if tells_ids:
        if not dialect.prompt_ids_on_top:
            result["prompt_token_ids"] = choice.ask.prompt_ids
        result["token_ids"] = delta.token_ids
    return result
