"""Parser events become Anthropic's stream events or one message, without engine or socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.api.anthropic.blocks import NOT_KEPT
from gateway.api.anthropic.responses import (
    AnsweredMessage,
    AnthropicEnvelope,
    MessagesErrorAnswer,
    error_body,
)
from gateway.api.anthropic.signature import MAX_SEALED_BYTES, sealed_text
from gateway.api.anthropic.stream import EventWriter, whole_message
from gateway.auth.caller import api_key_in
from gateway.formats.event_builder import INVALID_ARGUMENTS
from gateway.formats.events import (
    INVALID_JSON,
    Content,
    Event,
    Finished,
    OutputDelta,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
)
from gateway.generation.group import ChoiceGroup
from gateway.http.errors import fault_of, plain_fault
from protocol.engine.sampling import SamplingParams
from protocol.wire.errors import (
    EngineLost,
    InvalidRequest,
    Overloaded,
    ServingError,
    StepFailed,
    UnknownModel,
)
from tests.support import answers
from tests.support.anthropic import anthropic_events, message_of
from tests.support.event_scripts import SCRIPTS

ORIGIN = AnthropicEnvelope("1", 'model "m"', extensions={"ignored_params": ["speed"]})


def an_answer(max_tokens: int | None = 100) -> ChoiceGroup:
    answer = answers.new_choice_group(params=SamplingParams(max_tokens=max_tokens))
    answer.choices[0].num_generated = 10
    answer.choices[0].num_cached = 2
    return answer


def streamed(
    events: list[Event],
    *,
    envelope: AnthropicEnvelope = ORIGIN,
    answer: ChoiceGroup | None = None,
) -> bytes:
    """Return the stream of an answer that arrives event by event."""
    answer = answer or an_answer()
    written = answers.WrittenStream()
    writer = EventWriter(answer, written, envelope)
    for event in events:
        writer.delta(answer.choices[0], OutputDelta([event]))
    assert written.num_ends == 0
    writer.end()
    assert written.num_ends == 1
    return written.data


def whole(
    events: list[Event], *, envelope: AnthropicEnvelope = ORIGIN, answer: ChoiceGroup | None = None
) -> Any:
    message = whole_message(answer or an_answer(), events, envelope)
    msgspec.json.decode(message, type=AnsweredMessage)
    return json.loads(message)


THINKS_SAYS_CALLS = SCRIPTS["thinks, says, calls"]
GOLDEN = Path(__file__).parents[1] / "data" / "anthropic_stream.txt"
ALL_MEMBERS = AnthropicEnvelope(
    "1",
    "m",
    extensions={"ignored_params": ["speed"], "effective": {"chat_template_kwargs": {"a": 1}}},
    warnings=[OutputWarning("w", "x")],
    block_tokens=1,
)
TEXT_AND_CALL: list[Event] = [
    Content("I "),
    Content("look."),
    ToolCall(0, "c0", "weather"),
    ToolArguments(0, '{"city": "K\u00f6ln", "n": 1.50}'),
    ToolCallEnd(0),
    OutputWarning("odd", "it is"),
    Finished("tool_calls"),
]


def test_streams_and_a_complete_message_have_the_recorded_bytes() -> None:
    said = [
        streamed(THINKS_SAYS_CALLS),
        streamed(TEXT_AND_CALL, envelope=ALL_MEMBERS),
        whole_message(an_answer(), TEXT_AND_CALL, ALL_MEMBERS) + b"\n",
    ]
    assert b"".join(said) == GOLDEN.read_bytes()


@pytest.mark.parametrize(
    ("error", "members"),
    [
        (
            InvalidRequest("bad", param="x"),
            '"type":"invalid_request_error","message":"bad","param":"x"',
        ),
        (
            Overloaded("bad"),
            '"type":"rate_limit_error","message":"bad","details":{"error_code":"overloaded"}',
        ),
    ],
)
def test_an_error_has_these_bytes(error: ServingError, members: str) -> None:
    body = f'{{"type":"error","error":{{{members}}},"request_id":"1"}}'
    assert error_body(fault_of(error), "1").decode() == body
    written = answers.WrittenStream()
    writer = EventWriter(an_answer(), written, ORIGIN)
    writer.fail(error)
    assert written.data.decode() == f"event: error\ndata: {body}\n\n"


@pytest.mark.parametrize(
    ("finished", "max_tokens", "reason", "sequence"),
    [
        (Finished("stop"), 100, "end_turn", None),
        (Finished("stop", "END"), 100, "stop_sequence", "END"),
        (Finished("stop", 7), 100, "end_turn", None),
        (Finished("tool_calls"), 100, "tool_use", None),
        (Finished("tool_calls", "END"), 100, "tool_use", "END"),
        (Finished("abort"), 100, "pause_turn", None),
        (Finished("length"), 10, "max_tokens", None),
        (Finished("length"), 11, "model_context_window_exceeded", None),
    ],
)
def test_a_finish_reason_becomes_a_stop_reason(
    finished: Finished, max_tokens: int, reason: str, sequence: str | None
) -> None:
    message = whole([finished], answer=an_answer(max_tokens))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_invalid_arguments_become_an_object_with_one_warning() -> None:
    message = whole(SCRIPTS["no JSON"])
    assert message["content"][0]["input"] == {INVALID_JSON: '{"zone": Europe}'}
    assert [warning["code"] for warning in message["warnings"]] == [INVALID_ARGUMENTS]


def test_arguments_with_a_lone_surrogate_have_one_warning() -> None:
    text = '{"zone": "\\ud83d"}'
    events: list[Event] = [
        ToolCall(0, "c", "now"),
        ToolArguments(0, text),
        ToolCallEnd(0),
        Finished("stop"),
    ]
    message = whole(events)
    assert message["content"][0]["input"][INVALID_JSON] == text
    assert [warning["code"] for warning in message["warnings"]] == [INVALID_ARGUMENTS]


def test_hidden_thinking_is_a_block_whose_signature_holds_its_text() -> None:
    hidden = AnthropicEnvelope("1", "m", shows_thinking=False)
    events: list[Event] = [Reasoning("sec"), Reasoning("ret"), Content("said"), Finished("stop")]
    message = whole(events, envelope=hidden)
    thinking = message["content"][0]
    assert thinking["thinking"] == ""
    assert sealed_text(thinking["signature"], "signature") == "secret"
    assert sealed_text(whole(events)["content"][0]["signature"], "signature") == ""
    data = streamed(events, envelope=hidden)
    assert b"secret" not in data
    assert message_of(anthropic_events(data)) == message


def test_thinking_that_is_too_long_for_a_signature_is_not_kept_and_the_answer_says_so() -> None:
    hidden = AnthropicEnvelope("1", "m", shows_thinking=False)
    fits = "x" * MAX_SEALED_BYTES
    for text, codes in ((fits, []), (fits + "x", [NOT_KEPT])):
        events: list[Event] = [Reasoning(text), Content("said"), Finished("stop")]
        message = whole(events, envelope=hidden)
        assert [warning["code"] for warning in message.get("warnings", ())] == codes
        kept = sealed_text(message["content"][0]["signature"], "signature")
        assert kept == ("" if codes else text)
        assert len(message["content"][0]["signature"]) < 1.4 * MAX_SEALED_BYTES
        assert message_of(anthropic_events(streamed(events, envelope=hidden))) == message


def test_warnings_about_the_request_precede_those_about_the_answer() -> None:
    envelope = AnthropicEnvelope("1", "m", warnings=[OutputWarning("a", "b")])
    events: list[Event] = [Content("x"), OutputWarning("c", "d"), Finished("stop")]
    message = whole(events, envelope=envelope)
    assert [warning["code"] for warning in message["warnings"]] == ["a", "c"]
    assert message_of(anthropic_events(streamed(events, envelope=envelope))) == message


def test_message_start_is_sent_with_the_first_event_and_has_the_final_prompt_counts() -> None:
    answer, written, starts = an_answer(), answers.WrittenStream(), list[str]()
    (choice,) = answer.choices
    choice.num_cached = 0
    writer = EventWriter(
        answer,
        written,
        AnthropicEnvelope("1", "m", block_tokens=1),
        on_start=lambda: starts.append("start"),
    )
    writer.delta(choice, OutputDelta([], [72]))
    assert not written.data
    choice.num_cached = 1  # the engine reports this with the first token
    writer.delta(choice, OutputDelta([Content("H")]))
    assert (written.num_writes, starts) == (1, ["start"])
    writer.delta(choice, OutputDelta([Content("i"), Finished("stop")]))
    writer.end()
    start, ping, *_, last, _ = events = anthropic_events(written.data)
    assert ping["type"] == "ping"
    of_prompt = {"input_tokens": 1, "cache_creation_input_tokens": 1, "cache_read_input_tokens": 1}
    assert of_prompt.items() <= start["message"]["usage"].items()
    assert last["usage"] == of_prompt | {"output_tokens": 10}
    assert message_of(events)["usage"]["cache_creation"]["ephemeral_5m_input_tokens"] == 1


@pytest.mark.parametrize(
    ("block_tokens", "cached", "written"),
    [(0, 0, 0), (1, 0, 2), (1, 2, 0), (2, 0, 2), (2, 2, 0), (3, 0, 0), (16, 0, 0), (1, 3, 0)],
)
def test_cache_writes_are_the_tokens_that_the_same_prompt_can_reuse(
    block_tokens: int, cached: int, written: int
) -> None:
    """The prompt has three tokens. The last one is always computed."""
    answer = an_answer()
    answer.choices[0].num_cached = cached
    envelope = AnthropicEnvelope("1", "m", block_tokens=block_tokens)
    usage = whole([Content("x"), Finished("stop")], envelope=envelope, answer=answer)["usage"]
    assert usage["cache_creation_input_tokens"] == written
    assert usage["cache_creation"]["ephemeral_5m_input_tokens"] == written
    assert usage["cache_read_input_tokens"] == cached
    assert usage["input_tokens"] == 3 - cached - written


def test_a_failure_before_the_first_event_is_the_only_event() -> None:
    written = answers.WrittenStream()
    writer = EventWriter(an_answer(), written, ORIGIN)
    writer.fail(Overloaded("too much"))
    assert [event["type"] for event in anthropic_events(written.data)] == ["error"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("m", param="n"), "invalid_request_error"),
        (UnknownModel("m"), "not_found_error"),
        (Overloaded("m"), "rate_limit_error"),
        (EngineLost("m"), "overloaded_error"),
        (StepFailed("a secret"), "api_error"),
    ],
)
def test_an_error_has_the_type_of_its_status(error: ServingError, kind: str) -> None:
    message = json.loads(error_body(fault_of(error), "id"))
    msgspec.convert(message, MessagesErrorAnswer)
    assert message["error"]["type"] == kind
    assert message["error"].get("param") == error.param
    assert "secret" not in message["error"]["message"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
    ],
)
def test_an_http_error_has_a_type(status: int, kind: str) -> None:
    assert json.loads(error_body(plain_fault(status, "m"), "id"))["error"]["type"] == kind


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"Authorization": "Bearer abc"}, "abc"),
        ({"Authorization": "bearer  abc "}, "abc"),
        ({"Authorization": "Basic abc"}, None),
        ({"Authorization": "Bearer "}, None),
        ({"X-Api-Key": "abc"}, "abc"),
        ({"X-Api-Key": " "}, None),
        ({"Authorization": "Bearer abc", "X-Api-Key": "def"}, "abc"),
        ({"Authorization": "Basic x", "X-Api-Key": "def"}, "def"),
    ],
)
def test_the_api_key_may_be_in_either_header(headers: dict[str, str], key: str | None) -> None:
    assert api_key_in(headers) == key
