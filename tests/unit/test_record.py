"""The record of a request: whether it was accepted, how it ended, and the time of each stage."""

from __future__ import annotations

import pytest

from gateway.generation.group import ChoiceGroup
from gateway.generation.record import RequestRecord, answer_record, record_of, slowest
from gateway.generation.timeline import Timeline, TimelineMoment
from gateway.observe.timings import timings_of
from protocol.engine.messages import Accepted, Output, Refused, Times, Usage
from protocol.wire.errors import ErrorInfo
from tests.support.answers import new_choice_group

FIRST = Times(queued_s=1.0, prefill_s=2.0)


def usage(times: Times) -> Usage:
    return Usage(prompt_tokens=3, generated_tokens=1, times=times)


def record_for(answer: ChoiceGroup, status: int = 200) -> RequestRecord:
    return record_of(
        answer.timeline,
        answer,
        request_id="1",
        method="POST",
        path="/x",
        route="/x",
        status=status,
        key="",
        model="",
        is_probe=False,
    )


def accepted(n: int = 1) -> ChoiceGroup:
    answer = new_choice_group(n=n)
    for choice in answer.choices:
        answer.on_report(choice, Accepted(request=0))
    return answer


def test_a_refused_request_has_no_prompt_tokens() -> None:
    answer = new_choice_group(n=2)
    answer.on_report(answer.choices[0], Accepted(request=0))
    error = ErrorInfo(code="overloaded", message="full")
    answer.on_report(answer.choices[1], Refused(request=0, error=error))
    record = record_for(answer, 429)
    assert record.end == "refused"
    assert (record.answer.finish, record.answer.prompt_tokens) == ("refused", 0)
    assert not record.answer.is_accepted


def test_a_client_that_leaves_before_acceptance_has_hung_up_and_used_nothing() -> None:
    answer = new_choice_group()
    answer.abandon()
    record = record_for(answer, 499)
    assert (record.end, record.answer.is_accepted) == ("disconnected", False)
    assert record.answer.prompt_tokens == 0


def test_each_choice_ends_in_its_own_way() -> None:
    answer = accepted(n=3)
    one, two, _ = answer.choices
    answer.on_report(one, Output(request=0, tokens=[72], finish="length"))
    answer.on_report(two, Output(request=0, tokens=[72, 257], finish="stop", stop_token=257))
    answer.abandon()
    record = record_for(answer)
    assert [c.finish for c in record.answer.choices] == ["length", "stop", "disconnected"]
    assert (record.answer.finish, record.answer.generated_tokens) == ("disconnected", 3)
    assert record.answer.prompt_tokens == 3


def test_the_last_usage_of_the_engine_has_the_times() -> None:
    answer = accepted()
    (choice,) = answer.choices
    answer.on_report(choice, Output(request=0, tokens=[72], usage=usage(FIRST)))
    whole = Times(queued_s=1.0, prefill_s=2.0, decode_s=4.0)
    answer.on_report(choice, Output(request=0, tokens=[72], finish="length", usage=usage(whole)))
    record = record_for(answer)
    assert record.answer.times == whole


def test_an_abandoned_request_decoded_until_its_client_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("gateway.generation.timeline.time.monotonic", lambda: now)
    answer = accepted()
    now = 103.0
    first = Output(request=0, tokens=[72], usage=usage(FIRST))
    answer.on_report(answer.choices[0], first)
    now = 108.5
    answer.abandon()
    now = 120.0
    answer.timeline.note(TimelineMoment.ENDED)
    record = record_for(answer)
    assert record.took_s == 20.0
    assert (record.answer.first_token_s, record.answer.answered_s) == (3.0, 8.5)
    assert record.answer.times == Times(queued_s=1.0, prefill_s=2.0, decode_s=5.5)


@pytest.mark.parametrize(
    ("status", "end"),
    [(200, "finished"), (404, "refused"), (503, "refused"), (500, "error"), (499, "disconnected")],
)
def test_a_request_without_inference_ends_as_its_status_implies(status: int, end: str) -> None:
    fields = {"request_id": "1", "method": "GET", "path": "/", "route": "/", "key": "", "model": ""}
    record = record_of(Timeline(), None, status=status, is_probe=False, **fields)
    assert (record.end, record.answer) == (end, None)


def test_each_stage_of_several_choices_is_that_of_the_slowest() -> None:
    one, two = Times(queued_s=1.0, decode_s=5.0), Times(queued_s=3.0, decode_s=4.0)
    assert slowest([one, two]) == Times(queued_s=3.0, decode_s=5.0)
    assert slowest([]) == Times()


def test_rates_without_tokens_are_none() -> None:
    answer = accepted()
    timings = timings_of(answer_record(answer.timeline, answer), 0.0)
    assert timings.predicted_per_second is None
    assert timings.prompt_per_token_ms is None
    assert timings.first_token_ms is None


def test_a_moment_comes_once_and_time_stops_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("gateway.generation.timeline.time.monotonic", lambda: now)
    journal = Timeline()
    now = 11.0
    journal.note(TimelineMoment.FIRST_TOKEN)
    with journal.tokenizing():
        now = 14.0
    journal.note(TimelineMoment.FIRST_TOKEN)
    journal.note(TimelineMoment.ENDED)
    now = 99.0
    assert journal.at_s(TimelineMoment.FIRST_TOKEN) == 1.0
    assert journal.at_s(TimelineMoment.ACCEPTED) is None
    assert (journal.tokenize_s, journal.now_s) == (3.0, 4.0)
