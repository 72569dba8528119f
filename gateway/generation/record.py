"""The record of one finished request: the only source of its metrics, access log and traces.

It is built from the timeline and the choices. It contains no part of a prompt or an answer. The
request id is the only value that it takes from the headers.

Prompt tokens are counted only if the engine accepted the request. The time of a stage is the time
of the choice that was slowest in this stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from gateway.generation.group import ChoiceGroup
from gateway.generation.request import Choice
from gateway.generation.timeline import Timeline, TimelineMoment
from protocol.engine.messages import Times

End = Literal["finished", "aborted", "disconnected", "refused", "error"]
"""How a request ended, as a metric label and in the log."""
REFUSED = "refused"
"""The finish of a request that the engine did not accept."""
ENDS: dict[str, End] = {
    "abort": "aborted",
    "cancelled": "aborted",
    "disconnected": "disconnected",
    "error": "error",
}
"""Finish reason of an answer that was cut short -> how its request ended."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected. It appears only in logs and metrics."""


class ChoiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one choice."""

    #: The choice's own finish reason; the answer's finish if the choice has none.
    finish: str
    generated_tokens: int
    max_tokens: int | None
    temperature: float
    top_p: float
    #: None if the engine reported no times for this choice.
    times: Times | None


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of an inference request. A prompt's tokens are counted once for all choices."""

    #: "disconnected" if the client disconnected, "refused" if the engine did not accept the
    #: request, "error" if the request failed later. Otherwise the finish reason of the choice that
    #: ended last (stop, length, tool_calls, abort, cancelled).
    finish: str
    #: Whether the engine accepted all choices.
    is_accepted: bool
    #: All choices of the request, even if the request was refused.
    choices: list[ChoiceRecord]
    prompt_tokens: int
    #: Prompt tokens found in a prefix cache.
    cached_tokens: int
    #: Prompt tokens whose K/V was fetched from another engine.
    fetched_tokens: int
    generated_tokens: int
    #: Prompt tokens that are placeholders of images; and the images, those of them that had been
    #: preprocessed before, and the time spent on the others.
    image_tokens: int = 0
    images: int = 0
    cached_images: int = 0
    image_fetch_s: float = 0.0
    image_decode_s: float = 0.0
    image_preprocess_s: float = 0.0
    draft_tokens: int
    #: Draft tokens that were accepted.
    accepted_tokens: int
    preemptions: int
    #: Time spent in templates and the tokenizer.
    tokenize_s: float
    #: Time from the start of the request until it was sent to the engine; None if it was not sent.
    asked_s: float | None
    #: Time from the start of the request until the first token; None if there was none.
    first_token_s: float | None
    #: Time from the start of the request until all choices had ended.
    answered_s: float
    #: The longest time of any choice in each stage.
    times: Times


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of an HTTP request."""

    request_id: str
    method: str
    path: str
    #: The matched rule ("/v1/models/<name>"). It has few values, so metrics use it as a label.
    route: str
    #: HTTP status of the response.
    status: int
    #: Name of the caller's API key; "" if the caller has none.
    key: str
    #: Main name of the model that the request uses; "" if it uses none.
    model: str = ""
    #: Whether this is a health check or a scrape. These arrive every few seconds.
    is_probe: bool = False
    #: How the request ended. A request without inference is "finished", too, if its status is below
    #: 400.
    end: End
    #: Wall-clock time of the start, in nanoseconds since 1970.
    started_ns: int
    #: Time from the start to the end of the response.
    took_s: float
    #: None if this is not an inference request.
    answer: AnswerRecord | None


def record_of(
    timeline: Timeline,
    group: ChoiceGroup | None,
    *,
    request_id: str,
    method: str,
    path: str,
    route: str,
    status: int,
    key: str,
    model: str,
    is_probe: bool,
) -> RequestRecord:
    """Return the record of a request that ends now."""
    inference = answer_record(timeline, group) if group is not None else None
    return RequestRecord(
        request_id=request_id,
        method=method,
        path=path,
        route=route,
        status=status,
        key=key,
        model=model,
        is_probe=is_probe,
        end=_end(status, inference),
        started_ns=timeline.started_ns,
        took_s=timeline.now_s,
        answer=inference,
    )


def _end(status: int, answer: AnswerRecord | None) -> End:
    """Return how a request ended: by the answer's finish, or by the HTTP status if there is no
    answer or the engine refused it."""
    if answer is not None and answer.finish != REFUSED:
        return ENDS.get(answer.finish, "finished")
    if status == CLIENT_CLOSED_REQUEST:
        return "disconnected"
    if status == 500:
        return "error"
    return "refused" if status >= 400 else "finished"


def answer_record(timeline: Timeline, group: ChoiceGroup) -> AnswerRecord:
    """Return the record of an answer. Choices that are open are recorded as if they ended now."""
    now_s = timeline.at_s(TimelineMoment.ANSWERED)
    now_s = timeline.now_s if now_s is None else now_s
    is_accepted = timeline.has(TimelineMoment.ACCEPTED)
    finish = (group.finish or REFUSED) if is_accepted or group.is_gone else REFUSED
    choices = [_choice_record(choice, finish, now_s) for choice in group.choices]
    accepted, rejected = group.num_predictions
    images = [prompt.images for prompt in group.prompt_requests]
    usages = [choice.usage for choice in group.choices if choice.usage is not None]
    return AnswerRecord(
        finish=finish,
        is_accepted=is_accepted,
        choices=choices,
        prompt_tokens=group.num_prompt_tokens if is_accepted else 0,
        cached_tokens=group.num_cached_tokens,
        fetched_tokens=max((usage.fetched_tokens for usage in usages), default=0),
        generated_tokens=group.num_generated_tokens,
        image_tokens=sum(each.num_tokens for each in images) if is_accepted else 0,
        images=sum(each.times.num_images for each in images),
        cached_images=sum(each.times.num_hits for each in images),
        image_fetch_s=sum(each.times.fetch_s for each in images),
        image_decode_s=sum(each.times.decode_s for each in images),
        image_preprocess_s=sum(each.times.preprocess_s for each in images),
        draft_tokens=accepted + rejected,
        accepted_tokens=accepted,
        preemptions=sum(usage.preemptions for usage in usages),
        tokenize_s=timeline.tokenize_s,
        asked_s=timeline.at_s(TimelineMoment.SENT),
        first_token_s=timeline.at_s(TimelineMoment.FIRST_TOKEN),
        answered_s=now_s,
        times=slowest(choice.times for choice in choices if choice.times is not None),
    )


def _choice_record(choice: Choice, finish: str, now_s: float) -> ChoiceRecord:
    """Return the record of a choice.

    finish  the answer's finish, for a choice that has none
    now_s   seconds since the start of the request, for a choice that has not ended
    """
    times = choice.usage.times if choice.usage is not None else None
    if times is not None and choice.usage_s is not None:
        # The gateway ended the choice, so the engine reported no times at its end. Its last report
        # came with the first token. The time since then is added as decoding.
        ended_s = now_s if choice.ended_s is None else choice.ended_s
        decoded_s = times.decode_s + max(0.0, ended_s - choice.usage_s)
        times = msgspec.structs.replace(times, decode_s=decoded_s)
    return ChoiceRecord(
        finish=choice.finish or finish,
        generated_tokens=choice.num_generated,
        max_tokens=choice.params.max_tokens,
        temperature=choice.params.temperature,
        top_p=choice.params.top_p,
        times=times,
    )


def slowest(choices: Iterable[Times]) -> Times:
    """Return, for each stage, the longest time of any choice."""
    longest = Times()
    for times in choices:
        names = Times.__struct_fields__
        longest = Times(
            **{name: max(getattr(longest, name), getattr(times, name)) for name in names}
        )
    return longest
