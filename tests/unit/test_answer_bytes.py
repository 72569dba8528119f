"""Responses of the OpenAI API, of the token endpoint and of derendering have the recorded bytes.

The bytes are in tests/data/answer_bytes.txt. After an intended change of a response, run
`python -m tests.unit.test_answer_bytes` to record them again, and review the difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from gateway.api.openai.response_builder import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    OpenAIEnvelope,
    ResponseBuilder,
)
from gateway.api.openai.stream import ChunkStream, whole_response
from gateway.api.render.derender import ChatDerendering, CompletionDerendering
from gateway.api.render.requests import DerenderChat, DerenderCompletion
from gateway.api.tokens import stream as generate_stream
from gateway.api.tokens.requests import GenerateBody
from gateway.formats.choice_parser import ReadOptions
from gateway.formats.events import (
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
from gateway.formats.reasoning_tokens import ReasoningCounter, thinking_marks
from gateway.formats.registry import bind, format_of
from gateway.generation.group import ChoiceGroup
from gateway.generation.sinks import CollectSink
from gateway.text.tokenizer import Tokenizer
from protocol.wire.errors import Overloaded
from tests.support.answers import TOKENIZER, WrittenStream, new_choice_group
from tests.support.rendering import CONFIG
from tests.support.scripted_engine import scripted_card, scripted_logprob, thinking_card
from tests.support.served import served

RECORDED = Path(__file__).parents[1] / "data" / "answer_bytes.txt"
TIMINGS = re.compile(rb'"timings":\{[^}]*\}')
WARNING = OutputWarning("odd", 'an "odd" thing')
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "usage": {"includes_usage": True},
    "all": {"includes_usage": True, "repeats_usage": True, "includes_ids": True},
}
EXTENSIONS = {
    "ignored_params": ["mood"],
    "effective": {"chat_template_kwargs": {"enable_thinking": True}},
}


def logprobs_of(*tokens: int) -> list[Any]:
    return [
        msgspec.structs.replace(scripted_logprob(token, 1), asked_logprobs=[float("nan")])
        for token in tokens
    ]


def deltas(*, calls: bool) -> list[OutputDelta]:
    """Return the deltas of one choice, each with no, one or several events."""
    text = OutputDelta([Content('H"é\n')], [72, 195], logprobs_of(72, 195))
    end: list[Event] = [Content("!"), WARNING, Finished("stop", "st\u2028op")]
    if not calls:
        more = OutputDelta([], [169], logprobs_of(169))
        return [text, more, text, OutputDelta(end, [33], logprobs_of(33))]
    thought = OutputDelta([Reasoning("h\tm")], [104], logprobs_of(104))
    called: list[Event] = [
        ToolCall(0, "call_1", 'f"'),
        ToolArguments(0, '{"a":'),
        ToolArguments(0, "1}"),
    ]
    second: list[Event] = [
        ToolCallEnd(0),
        ToolCall(1, "call_2", "g"),
        ToolArguments(1, "{}"),
        ToolCallEnd(1),
    ]
    return [
        thought,
        thought,
        OutputDelta([Reasoning("?"), Content("a")], [1, 2], logprobs_of(1, 2)),
        text,
        OutputDelta(called, [3, 4], logprobs_of(3, 4)),
        OutputDelta([ToolArguments(0, "\\u00e9")], [5], logprobs_of(5)),
        OutputDelta(second, [6], logprobs_of(6)),
        OutputDelta([WARNING, Finished("tool_calls")], [], []),
    ]


def group_of(n: int, prompts: int, *, counted: bool) -> ChoiceGroup:
    group = new_choice_group(n=n, prompts=prompts)
    for choice in group.choices:
        choice.num_generated, choice.num_cached = 9, 2
        choice.prompt_logprobs = logprobs_of(2, 3)
        if counted:
            marks = thinking_marks(bind(format_of("hermes", "qwen3"), Tokenizer(thinking_card())))
            assert marks is not None
            choice.reasoning_counter = ReasoningCounter(marks, starts_inside=True)
            choice.reasoning_counter.count = 4
            choice.num_drafts, choice.num_accepted = 5, 3
    if counted:
        group.measure_parsing()
    return group


def chat(num_logprobs: int | None, *, in_batch: bool = False) -> ResponseBuilder:
    return ChatResponseBuilder(TOKENIZER, num_logprobs, [7], in_batch=in_batch)


def text(num_logprobs: int | None, echo: list[str] | None = None) -> ResponseBuilder:
    return CompletionResponseBuilder(TOKENIZER, num_logprobs, ReadOptions(), echo, [7])


def envelope_of(*, has_more: bool, completion: bool = False) -> OpenAIEnvelope:
    extensions = dict(EXTENSIONS) if has_more else {}
    if completion:
        extensions.pop("effective", None)
    return OpenAIEnvelope("id-1", 'm"', "print", 12, extensions)


def feed(group: ChoiceGroup, sink: Any, *, calls: bool) -> None:
    for choice in group.choices:
        for delta in deltas(calls=calls):
            sink.delta(choice, delta)
    sink.end()


def streamed(group: ChoiceGroup, builder: ResponseBuilder, more: bool, **options: Any) -> bytes:
    written = WrittenStream()
    calls = isinstance(builder, ChatResponseBuilder)
    envelope = envelope_of(has_more=more, completion=not calls)
    feed(group, ChunkStream(group, written, builder, envelope, **options), calls=calls)
    return written.data


def whole(group: ChoiceGroup, builder: ResponseBuilder, more: bool, **options: Any) -> bytes:
    calls = isinstance(builder, ChatResponseBuilder)
    collected = CollectSink(len(group.choices))
    feed(group, collected, calls=calls)
    envelope = envelope_of(has_more=more, completion=not calls)
    if more:
        envelope.extensions["kv_transfer_params"] = {"kv_handle": "k"}
    return whole_response(group, collected, builder, envelope, **options)


Case = Callable[[], bytes]


def openai_cases() -> Iterator[tuple[str, Case]]:
    builders: dict[str, Callable[[int | None], ResponseBuilder]] = {
        "chat": chat,
        "completion": text,
        "completion with echo": lambda count: text(count, ["ab\n", "c"]),
    }
    for (api, make), (name, options) in product(builders.items(), OPTIONS.items()):
        count = 1 if name == "all" else None
        more, num_choices = (False, 2) if name == "usage" else (True, 1)
        yield (
            f"stream of a {api} with {name}",
            partial(streamed, group_of(num_choices, 1, counted=more), make(count), more, **options),
        )
        ids = name == "all"
        yield (
            f"whole {api} with {name}",
            partial(
                whole,
                group_of(num_choices, 1, counted=more),
                make(count),
                more,
                includes_ids=ids,
                prompt_logprobs=(lambda _: [None, {2: {"logprob": -1.5}}]) if ids else None,
            ),
        )
    for ids in (False, True):
        yield (
            f"whole batch, ids {ids}",
            partial(
                whole,
                group_of(1, 2, counted=True),
                chat(0, in_batch=True),
                more=False,
                includes_ids=ids,
            ),
        )
    yield "content alone", partial(_alone, [Content("a"), Finished("length")])
    yield "reasoning alone", partial(_alone, [Reasoning("a"), Finished("length")])
    yield "nothing", partial(_alone, [Finished("abort")])
    yield "a failure", _failure


def _alone(events: list[Any]) -> bytes:
    group, collected = group_of(1, 1, counted=False), CollectSink(1)
    collected.delta(group.choices[0], OutputDelta(events, [1]))
    return whole_response(group, collected, chat(None), envelope_of(has_more=False))


def _failure() -> bytes:
    written = WrittenStream()
    group = group_of(1, 1, counted=False)
    stream = ChunkStream(group, written, chat(None), envelope_of(has_more=False))
    stream.fail(Overloaded("too much", retry_after_s=2))
    return written.data


# ---- the token endpoint
MODEL = served(scripted_card())


def token_cases() -> Iterator[tuple[str, Case]]:
    samplings: dict[str, dict[str, Any]] = {
        "plain": {},
        "logprobs": {"logprobs": 2, "logprob_token_ids": [7]},
    }
    usage = {"include_usage": True, "continuous_usage_stats": True}
    bodies: dict[str, dict[str, Any]] = {
        "tokens": {},
        "text": {"output_mode": "text"},
        "all": {"return_token_ids": True, "stream_options": usage, "model": "scripted"},
    }
    for (sampling, params), (name, fields) in product(samplings.items(), bodies.items()):
        body = msgspec.convert(
            {"token_ids": [1, 2, 3], "sampling_params": params, **fields}, GenerateBody
        )
        for streams in (True, False):
            kind = "stream of" if streams else "whole"
            yield f"{kind} generate, {sampling}, {name}", partial(_generated, body, streams)


def _generated(body: GenerateBody, streams: bool) -> bytes:
    group = group_of(1, 1, counted=True)
    envelope = generate_stream.GenerateEnvelope.from_request(body, MODEL, "7", ["mood"])
    envelope = generate_stream.GenerateEnvelope(
        envelope.id, envelope.model, "print", "digest", body, MODEL.tokenizer, ["mood"], 12
    )
    if streams:
        written = WrittenStream()
        feed(group, generate_stream.GenerateStream(group, written, envelope), calls=False)
        return written.data
    collected = CollectSink(1)
    feed(group, collected, calls=False)
    return generate_stream.whole_response(group, collected, envelope)


# ---- derendered chunks
CHUNK = {"request_id": "generate-tokens-chatcmpl-7", "system_fingerprint": "print"}
USAGE = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}


def generated(*tokens: int, **more: Any) -> dict[str, Any]:
    entries = [
        {"token_id": token, "logprob": -1.5, "rank": 1, "top_logprobs": []} for token in tokens
    ]
    return {"index": 0, "token_ids": tokens, "logprobs": {"content": entries}, **more}


def derendered_cases() -> Iterator[tuple[str, Case]]:
    for has_all in (False, True):
        more: dict[str, Any] = {}
        if has_all:
            more = {"return_token_ids": True, "stream_options": {"include_usage": True}}
            more |= {"logprobs": 0}
        title = "ids, usage and logprobs" if has_all else "text alone"
        yield f"derendered completion, {title}", partial(_derendered, more, completion=True)
        chat_more = {**more, "logprobs": True} if has_all else more
        yield f"derendered chat, {title}", partial(_derendered, chat_more, completion=False)


def _derendered(more: dict[str, Any], *, completion: bool) -> bytes:
    """Return two derendered answers to a chat or prompt: a complete "Hi", and "Hi!" in chunks."""
    model = served(scripted_card())
    messages = [{"role": "user", "content": "ab"}]
    asked = {"prompt": "ab"} if completion else {"messages": messages}
    request: dict[str, Any] = {"model": "scripted", **asked}
    kind = CompletionDerendering if completion else ChatDerendering
    body: Any = DerenderCompletion if completion else DerenderChat
    field = "completion_request" if completion else "chat_request"
    handle = {"kv_transfer_params": {"kv_handle": "k"}}
    response = {
        **CHUNK,
        "created": 12,
        "choices": [generated(72, 105, finish_reason="length")],
        "usage": USAGE,
        **handle,
    }
    given: Any = (
        {"generate_responses": [response]} if completion else {"generate_response": response}
    )
    plain = {name: value for name, value in more.items() if name != "stream_options"}
    whole_body = msgspec.convert({field: {**request, **plain}, **given}, body)
    found = [kind(whole_body, model, CONFIG).whole()]
    state = None
    for chunk in (
        {**CHUNK, "choices": [generated(72)]},
        {**CHUNK, "choices": [generated(105)]},
        {**CHUNK, "choices": [generated(33, finish_reason="length")], **handle},
        {**CHUNK, "choices": [], "usage": USAGE},
    ):
        streamed = {**request, **more, "stream": True}
        call = {"stream": True, field: streamed, "generate_chunk": chunk, "stream_state": state}
        part, state = kind(msgspec.convert(call, body), model, CONFIG).chunk()
        found.append(re.sub(rb'"created":\d+', b'"created":12', msgspec.json.encode(part)))
    return b"\n".join(found)


def recorded_now() -> bytes:
    parts = []
    for cases in (openai_cases(), token_cases(), derendered_cases()):
        for title, case in cases:
            data = TIMINGS.sub(b'"timings":{}', case()).replace(b"\n\n", b"\n").strip()
            parts.append(b"# %b\n%b\n" % (title.encode(), data))
    return b"\n".join(parts)


def test_every_byte_is_as_recorded() -> None:
    recorded = RECORDED.read_bytes().split(b"\n\n")
    for then, now in zip(recorded, recorded_now().split(b"\n\n"), strict=True):
        assert now == then


if __name__ == "__main__":
    RECORDED.write_bytes(recorded_now())
