"""A request in numbers, when it is over: made once, of its journal and its answer, and never
changed. Nothing of what people write is in it: no prompt, no answer, no header but the request id.

An answer counts as its engine has accepted it: the tokens of a prompt that was refused were not
prompted. What several choices took at the same time is told as what it took the slowest of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from gateway.generation.choice import Choice
from gateway.generation.group import ChoiceGroup
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
"""How an answer finished, where that was not by itself."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that did not wait. Nobody reads it but the log."""
NO_TIMES = Times()


class ChoiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """finish  stop, length, tool_calls, or as its answer's
    times   None where the engine has not told any
    """

    finish: str
    generated_tokens: int
    max_tokens: int | None
    temperature: float
    top_p: float
    times: Times | None


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An inference request's. Prompts count once, however many choices they have.

    finish        of the last choice: stop, length, tool_calls, abort; or error, disconnected,
                  cancelled; refused: the engine did not accept it
    choices       where it was refused, those that it would have had
    tokenize_s    templates and tokenizer
    asked_s, first_token_s, answered_s   since the request began, until the engine was asked, until
                  the first token came, and until the answer was over
    """

    finish: str
    is_accepted: bool
    choices: list[ChoiceRecord]
    prompt_tokens: int
    cached_tokens: int
    fetched_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_tokens: int
    preemptions: int
    tokenize_s: float
    asked_s: float | None
    first_token_s: float | None
    answered_s: float
    times: Times


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """route   the rule that matched ("/v1/models/<name>"), so that there are few
    key     the name of its key; "" where it has none
    is_probe   a health check or a scrape: machines ask every few seconds
    end     however it ended; what is no inference request is finished if it was answered
    """

    request_id: str
    method: str
    path: str
    route: str
    status: int
    key: str
    is_probe: bool = False
    end: End
    began_ns: int
    took_s: float
    answer: AnswerRecord | None


def record_of(
    journal: Timeline,
    answer: ChoiceGroup | None,
    *,
    request_id: str,
    method: str,
    path: str,
    route: str,
    status: int,
    key: str,
    is_probe: bool,
) -> RequestRecord:
    told = answer_record(journal, answer) if answer is not None else None
    return RequestRecord(
        request_id=request_id,
        method=method,
        path=path,
        route=route,
        status=status,
        key=key,
        is_probe=is_probe,
        end=_end(status, told),
        began_ns=journal.began_ns,
        took_s=journal.now_s,
        answer=told,
    )


def _end(status: int, answer: AnswerRecord | None) -> End:
    if answer is not None and answer.finish != REFUSED:
        return _ENDS.get(answer.finish, "finished")
    if status == CLIENT_CLOSED_REQUEST:
        return "disconnected"
    if status == 500:
        return "error"
    return "refused" if status >= 400 else "finished"


def answer_record(journal: Timeline, answer: ChoiceGroup) -> AnswerRecord:
    """As far as it has come: what is open is told as if it ended now."""
    now_s = journal.at_s(TimelineMoment.ANSWERED)
    now_s = journal.now_s if now_s is None else now_s
    is_accepted = journal.has(TimelineMoment.ACCEPTED)
    finish = (answer.finish or REFUSED) if is_accepted or answer.is_gone else REFUSED
    choices = [_choice_record(choice, finish, now_s) for choice in answer.choices]
    accepted, rejected = answer.num_predictions
    usages = [choice.usage for choice in answer.choices if choice.usage is not None]
    return AnswerRecord(
        finish=finish,
        is_accepted=is_accepted,
        choices=choices,
        prompt_tokens=answer.num_prompt_tokens if is_accepted else 0,
        cached_tokens=answer.num_cached_tokens,
        fetched_tokens=max((usage.fetched_tokens for usage in usages), default=0),
        generated_tokens=answer.num_generated_tokens,
        draft_tokens=accepted + rejected,
        accepted_tokens=accepted,
        preemptions=sum(usage.preemptions for usage in usages),
        tokenize_s=journal.tokenize_s,
        asked_s=journal.at_s(TimelineMoment.ASKED),
        first_token_s=journal.at_s(TimelineMoment.FIRST_TOKEN),
        answered_s=now_s,
        times=slowest(choice.times for choice in choices if choice.times is not None),
    )


def _choice_record(choice: Choice, finish: str, now_s: float) -> ChoiceRecord:
    times = choice.usage.times if choice.usage is not None else None
    if times is not None and choice.told_s is not None:
        # It was ended by us, not by the engine, so these are the times of its first token. From
        # then on it decoded, as far as is known here.
        ended_s = now_s if choice.ended_s is None else choice.ended_s
        decoded_s = times.decode_s + max(0.0, ended_s - choice.told_s)
        times = msgspec.structs.replace(times, decode_s=decoded_s)
    return ChoiceRecord(
        finish=choice.finish or finish,
        generated_tokens=choice.num_generated,
        max_tokens=choice.params.max_tokens,
        temperature=choice.params.temperature,
        top_p=choice.params.top_p,
        times=times,
    )


def slowest(told: Iterable[Times]) -> Times:
    """In each stage."""
    most = NO_TIMES
    for times in told:
        names = Times.__struct_fields__
        most = Times(**{name: max(getattr(most, name), getattr(times, name)) for name in names})
    return most
