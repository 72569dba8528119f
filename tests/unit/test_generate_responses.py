"""Responses of the token endpoint, streamed and complete. `test_answer_bytes` has their bytes."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from gateway.api.openai.responses import error_body
from gateway.api.tokens import prepare
from gateway.api.tokens.requests import GenerateBody
from gateway.api.tokens.responses import (
    GenerateChunk,
    GenerateResponse,
    GenerateTextChunk,
    GenerateTextResponse,
)
from gateway.api.tokens.stream import GenerateEnvelope, GenerateStream, chosen_token, whole_response
from gateway.engine.client import ZmqEngineClient
from gateway.formats.choice_parser import TokenPassthrough
from gateway.formats.events import Failed, Finished, OutputDelta
from gateway.generation.group import ChoiceGroup
from gateway.generation.sinks import CollectSink
from gateway.http.errors import fault_of
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import Output, Usage
from protocol.wire.errors import ErrorInfo, StepFailed
from tests.support.answers import WrittenStream
from tests.support.http import events_of
from tests.support.scripted_engine import EOS, scripted_card, scripted_logprob
from tests.support.served import served

MODEL = served(scripted_card())


def body_of(sampling: dict[str, Any] | None = None, **fields: Any) -> GenerateBody:
    said = {"token_ids": [1, 2, 3], "sampling_params": sampling or {}, **fields}
    return msgspec.convert(said, GenerateBody)


class GeneratedChunks(WrittenStream):
    """An answer that is streamed and collected from the same engine outputs."""

    def __init__(self, body: GenerateBody, ignored: list[str] | None = None) -> None:
        super().__init__()
        self.answer = ChoiceGroup(
            ZmqEngineClient("ipc:///nowhere"), [prepare.to_request(body, MODEL)]
        )
        self.envelope = GenerateEnvelope.from_request(body, MODEL, "7", ignored or [])
        self.stream = GenerateStream(self.answer, self, self.envelope)
        self.fold = CollectSink(len(self.answer.choices))

    def push(self, *outputs: Output, choice: int = 0) -> GeneratedChunks:
        """Pass engine outputs of one choice to the group."""
        self.answer.attach(_Both(self.stream, self.fold))
        for output in outputs:
            self.answer.on_report(self.answer.choices[choice], output)
        return self

    @property
    def events(self) -> list[Any]:
        return events_of(self.data)

    @property
    def whole(self) -> Any:
        return json.loads(whole_response(self.answer, self.fold, self.envelope))


class _Both:
    def __init__(self, *sinks: Any) -> None:
        self._sinks = sinks

    def __getattr__(self, name: str) -> Any:
        return lambda *args: [getattr(sink, name)(*args) for sink in self._sinks]


def say(*tokens: int, **more: Any) -> Output:
    return Output(request=0, tokens=list(tokens), **more)


def stop(*tokens: int, stop_token: int | None = EOS) -> Output:
    usage = Usage(prompt_tokens=3, generated_tokens=9, cached_tokens=2)
    return say(*tokens, finish="stop", stop_token=stop_token, usage=usage)


def test_a_response_names_the_weights_that_computed_it() -> None:
    whole = GeneratedChunks(body_of(model="scripted")).push(stop(EOS)).whole
    assert (whole["model"], whole["system_fingerprint"]) == ("scripted", MODEL.fingerprint)
    assert whole["weights_digest"] == "0123456789abcdef"


BODIES = {
    "plain": body_of(),
    "three": body_of({"n": 3}),
    "logprobs": body_of({"logprobs": 2}),
    "stop string": body_of({"stop": ["!"]}),
    "text": body_of(output_mode="text"),
    "text with logprobs": body_of({"logprobs": 1}, output_mode="text"),
    "usage": body_of(stream_options={"include_usage": True, "continuous_usage_stats": True}),
}


def output_of(token: int, logprobs: int | None) -> Output:
    generated = [] if logprobs is None else [scripted_logprob(token, logprobs)]
    return say(token, logprobs=generated)


@pytest.mark.parametrize("case", BODIES)
def test_chunks_add_up_to_the_complete_response_and_match_the_structs(case: str) -> None:
    body = BODIES[case]
    generated = GeneratedChunks(body)
    for index in range(body.sampling_params.n or 1):
        tokens = [72, 0xC3, 0xA9, 33 + index]
        outputs = [output_of(token, body.sampling_params.logprobs) for token in tokens]
        generated.push(*outputs, say(finish="length"), choice=index)
    text = body.output_mode == "text"
    for event in generated.events:
        kind = GenerateTextChunk if text else GenerateChunk
        assert json.loads(msgspec.json.encode(msgspec.convert(event, kind))) == event
    whole_kind = GenerateTextResponse if text else GenerateResponse
    assert (
        json.loads(msgspec.json.encode(msgspec.convert(generated.whole, whole_kind)))
        == generated.whole
    )
    for choice in generated.whole["choices"]:
        parts = [c for e in generated.events for c in e["choices"] if c["index"] == choice["index"]]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        assert [c for p in parts for c in (p["logprobs"] or {}).get("content", [])] == (
            choice["logprobs"] or {}
        ).get("content", [])
        assert "".join(part.get("text", "") for part in parts) == choice.get("text", "")
        assert [part["finish_reason"] for part in parts][:-1] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"] is not None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"return_token_ids": True, "timings": True, "model": "scripted"},
    ],
)
@pytest.mark.parametrize("ids", [[70000], [0], [1, 2]])
@pytest.mark.parametrize("index", [0, 1])
def test_the_fast_frame_has_the_bytes_of_the_struct(
    fields: dict[str, Any], ids: list[int], index: int
) -> None:
    generated = GeneratedChunks(body_of({"n": 2}, **fields)).push(say(1), say(2, 3), choice=1)
    generated.data = b""
    generated.push(say(*ids), choice=index)
    part = generated.envelope.part(generated.answer.choices[index], OutputDelta([], ids))
    chunk = GenerateChunk(
        request_id="generate-tokens-7", system_fingerprint=MODEL.fingerprint, choices=[part]
    )
    assert generated.data == b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def test_continuous_usage_counts_its_choice_and_requires_include_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    generated = GeneratedChunks(body_of({"n": 2}, stream_options=options))
    generated.push(say(1), choice=0).push(say(2), say(3), choice=1)
    generated.push(stop(EOS), choice=0).push(stop(EOS), choice=1)
    counts = [event["usage"]["completion_tokens"] for event in generated.events]
    assert counts == [1, 1, 2, 2, 3, 5]
    alone = GeneratedChunks(body_of(stream_options={"continuous_usage_stats": True})).push(
        say(1), stop(EOS)
    )
    assert [event["usage"] for event in alone.events] == [None, None]


def test_continuous_usage_counts_the_tokens_sent() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    generated = GeneratedChunks(body_of(stream_options=options))
    generated.answer.choices[0].num_generated = 7  # more than the client has been sent
    generated.push(say(1), say(2), stop(EOS))
    assert [e["usage"]["completion_tokens"] for e in generated.events[:-1]] == [1, 2, 3]


def test_a_stop_string_ends_the_tokens_and_is_the_stop_reason() -> None:
    generated = GeneratedChunks(body_of({"stop": ["lo!"]})).push(*(say(i) for i in b"Hello! World"))
    assert [i for event in generated.events for i in event["choices"][0]["token_ids"]] == list(
        b"Hello!"
    )
    end = generated.events[-1]["choices"][0]
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", "lo!")
    assert generated.whole["choices"][0]["token_ids"] == list(b"Hello!")


def test_mode_text_omits_the_stop_string_and_sends_its_tokens() -> None:
    generated = GeneratedChunks(body_of({"stop": ["lo!"]}, output_mode="text")).push(
        *(say(i) for i in b"Hello!")
    )
    (choice,) = generated.whole["choices"]
    assert (choice["text"], choice["token_ids"]) == ("Hel", list(b"Hello!"))
    assert "".join(event["choices"][0]["text"] for event in generated.events) == "Hel"


def test_only_a_stop_token_of_the_request_is_a_stop_reason() -> None:
    named = GeneratedChunks(body_of({"stop_token_ids": [9]})).push(stop(5, 9, stop_token=9))
    assert named.whole["choices"][0]["stop_reason"] == 9
    own = GeneratedChunks(body_of()).push(stop(5, EOS))
    assert own.whole["choices"][0]["stop_reason"] is None


ERROR = ErrorInfo(code="step_failed", message="the model's output was not a number")


@pytest.mark.parametrize("sampling", [{}, {"stop": ["x"]}], ids=["tokens", "text beside"])
@pytest.mark.parametrize("tokens", [[], [8]], ids=["empty", "with tokens"])
def test_an_error_is_sent_once_as_the_last_event(
    sampling: dict[str, Any], tokens: list[int]
) -> None:
    generated = GeneratedChunks(body_of(sampling)).push(
        say(7), say(*tokens, finish="error", error=ERROR)
    )
    *parts, error = generated.events
    assert [i for part in parts for i in part["choices"][0]["token_ids"]] == [7, *tokens]
    assert all(part["choices"][0]["finish_reason"] is None for part in parts)
    wanted = json.loads(error_body(fault_of(StepFailed(ERROR.message))))["error"]
    assert error["error"].keys() == wanted.keys()
    assert error["error"]["code"] == "step_failed"
    assert generated.data.endswith(b"data: [DONE]\n\n")


def test_an_abort_is_a_finish_reason() -> None:
    generated = GeneratedChunks(body_of()).push(say(7), say(finish="abort"))
    assert generated.events[-1]["choices"][0]["finish_reason"] == "abort"
    assert generated.whole["choices"][0]["token_ids"] == [7]


def test_fields_without_effect_are_named_once() -> None:
    generated = GeneratedChunks(body_of(), ["mood"]).push(say(7), stop(EOS))
    assert [event.get("ignored_params") for event in generated.events] == [["mood"], None]
    assert generated.whole["ignored_params"] == ["mood"]


# ---- logprobs
def test_top_tokens_are_the_sampled_one_then_by_rank_then_requested_ones() -> None:
    entry = TokenLogprobs(5, -2.0, 3, [8, 9, 5], [-0.5, -1.0, -2.0], [-7.0, -1.0])
    assert json.loads(msgspec.json.encode(chosen_token(entry, [4, 9]))) == {
        "token_id": 5,
        "logprob": -2.0,
        "rank": 3,
        "top_logprobs": [
            {"token_id": 5, "logprob": -2.0, "rank": 3},
            {"token_id": 8, "logprob": -0.5, "rank": 1},
            {"token_id": 9, "logprob": -1.0, "rank": 2},
            {"token_id": 4, "logprob": -7.0, "rank": None},
        ],
    }


def test_a_token_has_the_logprobs_of_both_distributions() -> None:
    drawn = [-0.1, -math.inf, -0.1, -math.inf]
    entry = TokenLogprobs(5, -2.0, 2, [8, 5], [-0.5, -2.0], [-7.0], drawn)
    generated = json.loads(msgspec.json.encode(chosen_token(entry, [4])))
    assert (generated["logprob"], generated["sampling_logprob"]) == (-2.0, -0.1)
    beside = {top["token_id"]: top["sampling_logprob"] for top in generated["top_logprobs"]}
    assert beside == {5: -0.1, 8: -9999.0, 4: -9999.0}


def test_prompt_logprobs_are_keyed_by_token_id_and_null_for_the_first_token() -> None:
    entries = [scripted_logprob(token, 1) for token in (2, 3)]
    generated = GeneratedChunks(body_of({"prompt_logprobs": 1}))
    generated.push(say(7, prompt_logprobs=entries), stop(EOS))
    first, second, third = generated.whole["prompt_logprobs"]
    assert (first, list(second), list(third)) == (None, ["2"], ["3"])
    assert second["2"] == {"logprob": -2 / 64, "rank": 1, "decoded_token": "\x02"}


def test_mode_text_has_the_logprobs_of_a_chat() -> None:
    generated = GeneratedChunks(body_of({"logprobs": 1}, output_mode="text"))
    generated.push(say(72, logprobs=[scripted_logprob(72, 1)]), stop())
    (item,) = generated.whole["choices"][0]["logprobs"]["content"]
    assert (item["token"], item["bytes"], item["top_logprobs"][0]["token"]) == ("H", [72], "H")


# ---- the token passthrough
def test_the_token_passthrough_emits_tokens_until_the_finish() -> None:
    reader = TokenPassthrough([EOS])
    entry = scripted_logprob(8, 0)
    assert reader.push(say(8, logprobs=[entry])) == OutputDelta([], [8], [entry])
    assert not reader.push(say())
    assert reader.push(stop(9, EOS)) == OutputDelta([Finished("stop")], [9, EOS])
    assert reader.push(say(9, finish="error", error=ERROR)) == OutputDelta(num_after_end=1)
    failed = TokenPassthrough([EOS]).push(say(finish="error", error=ERROR))
    assert failed == OutputDelta([Failed(ERROR)])
