"""The record of one finished request: the only source of metrics, logs and traces.

It is built once, from the timeline and the choices. It has no content: no prompt, no output and no
header but the request id.

Prompt tokens count only if the engine accepted the request. Each stage's time is that of the
slowest choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from gateway.generation.group import ChoiceGroup
from gateway.generation.request import Choice
from gateway.generation.timeline import Timeline, TimelineMoment
from protocol.messages import Times

End = Literal["finished", "aborted", "disconnected", "refused", "error"]
REFUSED = "refused"
_ENDS: dict[str, End] = {
    "abort": "aborted",
    "cancelled": "aborted",
    "disconnected": "disconnected",
    "error": "error",
}
"""Finish reason -> end, for answers that did not end by themselves."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected. It appears only in logs and metrics."""
NO_TIMES = Times()


class ChoiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one choice.

    finish  stop, length, tool_calls, or the finish of its answer
    times   None if the engine reported none
    """

    finish: str
    generated_tokens: int
    max_tokens: int | None
    temperature: float
    top_p: float
    times: Times | None


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of an inference request. A prompt counts once, however many choices it has."""

    #: Of the last choice: stop, length, tool_calls or abort; or error, disconnected, cancelled; or
    #: refused by the engine.
    finish: str
    is_accepted: bool
    #: If refused, the choices that were requested.
    choices: list[ChoiceRecord]
    prompt_tokens: int
    cached_tokens: int
    fetched_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_tokens: int
    preemptions: int
    #: Time spent in templates and the tokenizer.
    tokenize_s: float
    #: From the start of the request until it was sent to the engine, until the first token, and
    #: until the end of all choices.
    asked_s: float | None
    first_token_s: float | None
    answered_s: float
    times: Times


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of an HTTP request."""

    request_id: str
    method: str
    path: str
    #: The matched rule ("/v1/models/<name>"), so that label values are few.
    route: str
    status: int
    #: Name of its API key; "" if it has none.
    key: str
    #: Whether it is a health check or a scrape, which come every few seconds.
    is_probe: bool = False
    #: A request without inference is "finished" if it was answered.
    end: End
    began_ns: int
    took_s: float
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
    is_probe: bool,
) -> RequestRecord:
    inference = answer_record(timeline, group) if group is not None else None
    return RequestRecord(
        request_id=request_id,
        method=method,
        path=path,
        route=route,
        status=status,
        key=key,
        is_probe=is_probe,
        end=_end(status, inference),
        began_ns=timeline.began_ns,
        took_s=timeline.now_s,
        answer=inference,
    )


def _end(status: int, answer: AnswerRecord | None) -> End:
    if answer is not None and answer.finish != REFUSED:
        return _ENDS.get(answer.finish, "finished")
    if status == CLIENT_CLOSED_REQUEST:
        return "disconnected"
    if status == 500:
        return "error"
    return "refused" if status >= 400 else "finished"


def answer_record(timeline: Timeline, group: ChoiceGroup) -> AnswerRecord:
    """Return the record of an answer. Open choices are recorded as if they ended now."""
    now_s = timeline.at_s(TimelineMoment.ANSWERED)
    now_s = timeline.now_s if now_s is None else now_s
    is_accepted = timeline.has(TimelineMoment.ACCEPTED)
    finish = (group.finish or REFUSED) if is_accepted or group.is_gone else REFUSED
    choices = [_choice_record(choice, finish, now_s) for choice in group.choices]
    accepted, rejected = group.num_predictions
    usages = [choice.usage for choice in group.choices if choice.usage is not None]
    return AnswerRecord(
        finish=finish,
        is_accepted=is_accepted,
        choices=choices,
        prompt_tokens=group.num_prompt_tokens if is_accepted else 0,
        cached_tokens=group.num_cached_tokens,
        fetched_tokens=max((usage.fetched_tokens for usage in usages), default=0),
        generated_tokens=group.num_generated_tokens,
        draft_tokens=accepted + rejected,
        accepted_tokens=accepted,
        preemptions=sum(usage.preemptions for usage in usages),
        tokenize_s=timeline.tokenize_s,
        asked_s=timeline.at_s(TimelineMoment.ASKED),
        first_token_s=timeline.at_s(TimelineMoment.FIRST_TOKEN),
        answered_s=now_s,
        times=slowest(choice.times for choice in choices if choice.times is not None),
    )


def _choice_record(choice: Choice, finish: str, now_s: float) -> ChoiceRecord:
    times = choice.usage.times if choice.usage is not None else None
    if times is not None and choice.usage_s is not None:
        # The gateway ended the choice, so the engine's last times are those of its first token.
        # The time since then counts as decoding.
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
    """Return the longest time of each stage."""
    longest = NO_TIMES
    for times in choices:
        names = Times.__struct_fields__
        longest = Times(
            **{name: max(getattr(longest, name), getattr(times, name)) for name in names}
        )
    return longest
