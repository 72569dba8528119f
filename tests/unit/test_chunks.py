"""Parser events become stream frames or a complete response, without engine or socket."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from gateway.api.openai.response_builder import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    OpenAIEnvelope,
    ResponseBuilder,
)
from gateway.api.openai.responses import (
    ChatChunk,
    ChatChunkChoice,
    CompletionChunk,
    CompletionChunkChoice,
    FunctionPart,
    MessagePart,
    ToolCallPart,
    error_body,
)
from gateway.api.openai.stream import AnswerChunks, ChunkStream, whole_response
from gateway.formats.choice_parser import ReadOptions
from gateway.formats.events import (
    Content,
    Event,
    Failed,
    Finished,
    OutputDelta,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
)
from gateway.generation.group import ChoiceGroup
from gateway.generation.sinks import CollectSink
from gateway.http.errors import fault_of
from protocol.engine.messages import Output, Usage
from protocol.wire.errors import (
    ContextTooLong,
    EngineLost,
    ErrorInfo,
    InvalidRequest,
    Overloaded,
    ServingError,
    StepFailed,
    UnknownModel,
)
from tests.support.answers import TOKENIZER, WrittenStream, new_choice_group
from tests.support.http import events_of
from tests.support.scripted_engine import scripted_logprob

ENVELOPE = OpenAIEnvelope("chatcmpl-1", 'model "m"', "print", created=12)


class ReceivedChunks(WrittenStream):
    """A sink that writes a stream, and the bytes that it wrote."""

    def __init__(
        self,
        answer: ChoiceGroup,
        builder: ResponseBuilder,
        model: str = ENVELOPE.model,
        **options: Any,
    ) -> None:
        super().__init__()
        envelope = replace(ENVELOPE, model=model)
        self.stream = ChunkStream(answer, self, builder, envelope, **options)

    def events(self) -> list[Any]:
        assert self.num_ends == 1
        return events_of(self.data)


def chat_builder(num_logprobs: int | None = None) -> ChatResponseBuilder:
    return ChatResponseBuilder(TOKENIZER, num_logprobs)


def test_nothing_is_written_before_the_first_token() -> None:
    received = ReceivedChunks(new_choice_group(), chat_builder())
    assert received.data == b""


def test_the_roles_of_all_choices_precede_all_tokens() -> None:
    answer = new_choice_group(n=2)
    received = ReceivedChunks(answer, chat_builder())
    for choice in reversed(answer.choices):
        received.stream.delta(choice, OutputDelta([Content("x"), Finished("stop")]))
    received.stream.end()
    choices = [event["choices"][0] for event in received.events()]
    assert [(c["index"], c["delta"]) for c in choices] == [
        (0, {"role": "assistant", "content": "", "refusal": None}),
        (1, {"role": "assistant", "content": "", "refusal": None}),
        (1, {"content": "x"}),
        (1, {}),
        (0, {"content": "x"}),
        (0, {}),
    ]


def test_every_chunk_is_json_whatever_the_text_and_the_names() -> None:
    answer = new_choice_group()
    received = ReceivedChunks(answer, chat_builder())
    text = 'a"b\\c\n\u2028\x01</script>é'
    received.stream.delta(answer.choices[0], OutputDelta([Content(text)]))
    received.stream.delta(answer.choices[0], OutputDelta([Finished("stop", 'st"op')]))
    received.stream.end()
    _, content, finish = received.events()
    assert content["choices"][0]["delta"]["content"] == text
    assert content["model"] == 'model "m"'
    assert finish["choices"][0]["stop_reason"] == 'st"op'
    assert b"\n" not in received.data.replace(b"\n\n", b"")


def test_tokens_are_sent_once_with_their_text_or_with_the_end() -> None:
    answer = new_choice_group()
    received = ReceivedChunks(answer, chat_builder(1), includes_ids=True)
    (choice,) = answer.choices
    logprobs = [scripted_logprob(token, 1) for token in (72, 105, 257)]
    received.stream.delta(choice, OutputDelta([Content("H")], [72], logprobs[:1]))
    received.stream.delta(
        choice, OutputDelta([Content("i"), Finished("stop")], [105], logprobs[1:2])
    )
    received.stream.end()
    role, first, second, finish = received.events()
    assert role["prompt_token_ids"] == [1, 2, 3]
    bits = [event["choices"][0] for event in (first, second, finish)]
    assert [bit["token_ids"] for bit in bits] == [[72], [105], []]
    assert [bit["logprobs"] and len(bit["logprobs"]["content"]) for bit in bits] == [1, 1, None]

    answer = new_choice_group()
    received = ReceivedChunks(answer, chat_builder(1), includes_ids=True)
    received.stream.delta(answer.choices[0], OutputDelta([Finished("stop")], [257], logprobs[2:]))
    received.stream.end()
    _, finish = received.events()
    assert finish["choices"][0]["token_ids"] == [257]
    assert len(finish["choices"][0]["logprobs"]["content"]) == 1


def test_the_last_chunk_of_a_completion_has_its_last_text_and_logprobs() -> None:
    answer = new_choice_group()
    received = ReceivedChunks(answer, _text_builder(1, None), includes_ids=True)
    (choice,) = answer.choices
    logprobs = [scripted_logprob(token, 1) for token in (72, 105)]
    received.stream.delta(choice, OutputDelta([Content("H")], [72], logprobs[:1]))
    odd = OutputWarning("odd", "an odd thing")
    received.stream.delta(
        choice, OutputDelta([Content("i"), odd, Finished("stop")], [105], logprobs[1:])
    )
    received.stream.end()
    _, first, last = received.events()
    assert first["choices"][0]["finish_reason"] is None
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("i", "stop")
    assert last["choices"][0]["token_ids"] == [105]
    assert last["choices"][0]["logprobs"]["tokens"] == ["i"]
    assert [warning["code"] for warning in last["warnings"]] == ["odd"]


def test_a_failure_ends_the_stream_with_one_event() -> None:
    answer = new_choice_group()
    received = ReceivedChunks(answer, chat_builder())
    received.stream.delta(
        answer.choices[0], OutputDelta([Failed(ErrorInfo(code="x", message="y"))])
    )
    received.stream.fail(Overloaded("too much"))
    (event,) = received.events()
    assert event["error"]["code"] == "overloaded"


def test_usage_counts_each_prompt_once_and_all_choices() -> None:
    answer = new_choice_group(n=2, prompts=2)
    for choice in answer.choices:
        choice.num_generated = 10
        choice.num_cached = 1 + choice.index % 2
    received = ReceivedChunks(answer, chat_builder(), includes_usage=True)
    received.stream.end()
    assert received.events()[0]["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 40,
        "total_tokens": 46,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_continuous_usage_counts_the_tokens_sent_of_its_choice() -> None:
    """All tokens are generated before the first chunk is sent, as for a slow client."""
    answer = new_choice_group(n=2)
    first, second = answer.choices
    first.num_generated, second.num_generated = 3, 9
    received = ReceivedChunks(answer, chat_builder(), includes_usage=True, repeats_usage=True)
    received.stream.delta(first, OutputDelta([Content("a")], [72]))
    received.stream.delta(second, OutputDelta([Content("bc")], [73, 74]))
    received.stream.delta(first, OutputDelta([Content("d"), Finished("stop")], [75, 257]))
    received.stream.end()
    *chunks, last = received.events()
    counts = [
        (chunk["choices"][0]["index"], chunk["usage"]["completion_tokens"]) for chunk in chunks
    ]
    assert counts == [(0, 0), (1, 0), (0, 1), (1, 2), (0, 3), (0, 3)]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 12)


def test_continuous_usage_counts_only_the_prompt_of_its_choice() -> None:
    answer = new_choice_group(prompts=2)
    received = ReceivedChunks(
        answer, _text_builder(None, None), includes_usage=True, repeats_usage=True
    )
    for choice in answer.choices:
        received.stream.delta(choice, OutputDelta([Content("a"), Finished("stop")], [72]))
    received.stream.end()
    *chunks, _ = received.events()
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [4, 4]


def test_usage_has_the_draft_counts_that_the_engine_reported() -> None:
    answer = new_choice_group(n=2)
    for choice, (drafts, accepted) in zip(answer.choices, [(5, 3), (2, 0)], strict=True):
        usage = Usage(
            prompt_tokens=3, generated_tokens=1, draft_tokens=drafts, accepted_tokens=accepted
        )
        answer.on_report(choice, Output(request=0, tokens=[72], usage=usage))
    received = ReceivedChunks(answer, chat_builder(), includes_usage=True)
    received.stream.end()
    details = received.events()[0]["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4}


@pytest.mark.parametrize("num_logprobs", [None, 0, 2])
@pytest.mark.parametrize("prompts", [None, ["abc"]], ids=["", "echo"])
def test_a_folded_stream_equals_the_complete_response(
    num_logprobs: int | None, prompts: list[str] | None
) -> None:
    """Both sinks receive the same deltas. Each has its own builder, because builders store
    offsets."""
    deltas = [
        OutputDelta([Content("H")], [72], [scripted_logprob(72, 2)]),
        OutputDelta(
            [Content("é")], [195, 169], [scripted_logprob(195, 2), scripted_logprob(169, 2)]
        ),
        OutputDelta([Finished("length")], [], []),
    ]
    received, answer, whole = None, new_choice_group(), b""
    (choice,) = answer.choices
    choice.prompt_logprobs = [scripted_logprob(2, 2), scripted_logprob(3, 2)]
    received = ReceivedChunks(answer, _text_builder(num_logprobs, prompts))
    fold = CollectSink(1)
    for sink in (received.stream, fold):
        for delta in deltas:
            sink.delta(choice, delta)
        sink.end()
    whole = whole_response(answer, fold, _text_builder(num_logprobs, prompts), ENVELOPE)
    (whole_choice,) = json.loads(whole)["choices"]
    bits = [event["choices"][0] for event in received.events()]
    assert "".join(bit["text"] for bit in bits) == whole_choice["text"]
    assert whole_choice["text"] == ("abc" if prompts else "") + "Hé"
    parts = [bit["logprobs"] for bit in bits if bit["logprobs"] is not None]
    if num_logprobs is None:
        assert parts == []
        assert whole_choice["logprobs"] is None
    else:
        for name, items in whole_choice["logprobs"].items():
            assert [item for part in parts for item in part[name]] == items


def _text_builder(num_logprobs: int | None, prompts: list[str] | None) -> CompletionResponseBuilder:
    return CompletionResponseBuilder(TOKENIZER, num_logprobs, ReadOptions(), prompts)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry"),
    [
        (InvalidRequest("m", param="n"), 400, "invalid_request_error", None, None),
        (ContextTooLong("m"), 400, "invalid_request_error", "context_length_exceeded", None),
        (UnknownModel("m"), 404, "invalid_request_error", "model_not_found", None),
        (Overloaded("m", retry_after_s=1.2), 429, "rate_limit_error", "overloaded", 2),
        (Overloaded("m"), 429, "rate_limit_error", "overloaded", 1),
        (EngineLost("m"), 503, "service_unavailable_error", "engine_lost", 1),
        (StepFailed("a secret"), 500, "server_error", "step_failed", None),
        (ServingError("a secret"), 500, "server_error", "internal", None),
    ],
)
def test_an_error_has_the_status_and_type_of_its_cause(
    error: ServingError, status: int, kind: str, code: str | None, retry: int | None
) -> None:
    received = fault_of(error)
    body = json.loads(error_body(received))["error"]
    assert (received.status, body["type"], body["code"]) == (status, kind, code)
    assert received.retry_after_s == retry
    assert body["param"] == error.param
    if status == 500:
        assert "secret" not in body["message"]
    else:
        assert body["message"] == "m"


TEXTS = ["a", "", 'a"b\\c\n\u2028\x00</script>é', "\0"]


@pytest.mark.parametrize("usage", [UNSET, None], ids=["", "include_usage"])
@pytest.mark.parametrize("name", ["m", 'a "\0" model', "\0"])
@pytest.mark.parametrize("index", [0, 1])
def test_the_template_of_a_chats_text_has_the_bytes_of_the_struct(
    usage: None, name: str, index: int
) -> None:
    group = new_choice_group(n=2)
    options: Any = {"includes_usage": True} if usage is None else {}
    received = ReceivedChunks(group, chat_builder(), name, **options)
    received.stream.delta(group.choices[index], OutputDelta())
    for text in TEXTS:
        function = FunctionPart(arguments=text)
        parts: list[tuple[Event, MessagePart]] = [
            (Content(text), MessagePart(content=text)),
            (Reasoning(text), MessagePart(reasoning=text, reasoning_content=text)),
        ]
        for call in (0, 12):
            part = MessagePart(tool_calls=[ToolCallPart(index=call, function=function)])
            parts.append((ToolArguments(call, text), part))
        for event, part in parts:
            received.data = b""
            received.stream.delta(group.choices[index], OutputDelta([event]))
            choice = ChatChunkChoice(index=index, delta=part, logprobs=None, finish_reason=None)
            chunk = ChatChunk(
                id="chatcmpl-1",
                object="chat.completion.chunk",
                created=12,
                model=name,
                system_fingerprint="print",
                service_tier="default",
                choices=[choice],
                usage=usage,
            )
            assert received.data == b"data: " + msgspec.json.encode(chunk) + b"\n\n"


@pytest.mark.parametrize("usage", [UNSET, None], ids=["", "include_usage"])
@pytest.mark.parametrize("prompts", [None, ["abc"]], ids=["", "echo"])
@pytest.mark.parametrize("index", [0, 1])
def test_the_template_of_a_completions_text_has_the_bytes_of_the_struct(
    usage: None, prompts: list[str] | None, index: int
) -> None:
    group = new_choice_group(n=2)
    options: Any = {"includes_usage": True} if usage is None else {}
    received = ReceivedChunks(group, _text_builder(None, prompts), **options)
    received.stream.delta(group.choices[index], OutputDelta())
    for text in TEXTS:
        received.data = b""
        received.stream.delta(group.choices[index], OutputDelta([Content(text)]))
        choice = CompletionChunkChoice(index=index, text=text, logprobs=None, finish_reason=None)
        chunk = CompletionChunk(
            id="chatcmpl-1",
            object="text_completion",
            created=12,
            model='model "m"',
            system_fingerprint="print",
            choices=[choice],
            usage=usage,
        )
        assert received.data == b"data: " + msgspec.json.encode(chunk) + b"\n\n"


@pytest.mark.parametrize("num_logprobs", [None, 0, 2])
@pytest.mark.parametrize("name", ["m", "\0", "\1"])
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_template_with_logprobs_has_the_bytes_of_the_struct(
    is_chat: bool, name: str, num_logprobs: int | None
) -> None:
    """The chunks of `AnswerChunks` are encoded whole."""
    group = new_choice_group(n=2)
    builders: list[ResponseBuilder] = [
        chat_builder(num_logprobs) if is_chat else _text_builder(num_logprobs, None) for _ in "12"
    ]
    received = ReceivedChunks(group, builders[0], name)
    encoded = AnswerChunks(group, builders[1], replace(ENVELOPE, model=name))
    for number, text in enumerate([*TEXTS, "\1", "end"]):
        events: list[Event] = [Content(text)]
        if is_chat:
            events += [Reasoning(text), ToolArguments(0, text), ToolArguments(3, text)]
        ids = [72, 230, 151, 165][: number % 5]  # none, whole characters and parts of one
        logprobs = [scripted_logprob(token, 2) for token in ids]
        for event in events:
            delta = OutputDelta([event], ids, logprobs if num_logprobs is not None else [])
            received.data = b""
            received.stream.delta(group.choices[number % 2], delta)
            frames = [
                b"data: " + msgspec.json.encode(chunk) + b"\n\n"
                for chunk in encoded.push(group.choices[number % 2], delta)
            ]
            assert received.data == b"".join(frames)


@pytest.mark.parametrize("includes_usage", [False, True])
def test_an_event_has_the_same_chunk_alone_and_among_others(includes_usage: bool) -> None:
    """If a delta has a single event, its chunk may be made from a template of bytes."""
    bits: list[Event] = [
        Reasoning('"hm"\n'),
        Content("well — so"),
        ToolCall(0, "call_1", "f"),
        ToolArguments(0, '{"a": "\\u00e9'),
        ToolArguments(0, '"}'),
        ToolCallEnd(0),
        OutputWarning("odd", "an odd thing"),
        Content("x"),
        Finished("stop"),
    ]
    both = []
    for deltas in ([OutputDelta([bit]) for bit in bits], [OutputDelta(bits)]):
        answer = new_choice_group()
        received = ReceivedChunks(answer, chat_builder(), includes_usage=includes_usage)
        received.stream.delta(answer.choices[0], OutputDelta())
        for delta in deltas:
            received.stream.delta(answer.choices[0], delta)
        received.stream.end()
        both.append(received.data)
    assert both[0] == both[1]
    assert both[0].count(b"\n\n") == len(bits) - 1 - 1 + 2 + includes_usage
