"""The token endpoint's answers: the peer's JSON to the letter, streamed and whole; no engine, no
socket.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from gateway.api.openai.responses import error_body
from gateway.api.tokens import prepare as asking
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
from protocol.errors import ErrorInfo, StepFailed
from protocol.messages import Output, TokenLogprobs, Usage
from tests.support.http import events_of
from tests.support.scripted_engine import EOS, scripted_card, scripted_logprob
from tests.support.served import served

MODEL = served(scripted_card())
DIGEST = "0123456789abcdef"
LATE = {"mm_placeholders": None, "metrics": None, "ec_transfer_params": None}
NEVER = {"routed_experts": None, "sampling_mask": None, "weight_versions": None}


def body_of(sampling: dict[str, Any] | None = None, **fields: Any) -> GenerateBody:
    said = {"token_ids": [1, 2, 3], "sampling_params": sampling or {}, **fields}
    return msgspec.convert(said, GenerateBody)


class GeneratedChunks:
    """An answer that is given the engine's news, streamed and folded at once."""

    def __init__(self, body: GenerateBody, ignored: list[str] | None = None) -> None:
        self.data = b""
        self.answer = ChoiceGroup(
            ZmqEngineClient("ipc:///nowhere"), [asking.to_request(body, MODEL)]
        )
        self.telling = GenerateEnvelope.from_request(body, MODEL, "7", ignored or [])
        self.stream = GenerateStream(
            self.answer, self.telling, write=self._write, finish=lambda: None
        )
        self.fold = CollectSink(len(self.answer.choices))

    def _write(self, data: bytes) -> None:
        self.data += data

    def push(self, *outputs: Output, choice: int = 0) -> GeneratedChunks:
        """The engine's news of a choice, as the answer takes it."""
        self.answer.attach(_Both(self.stream, self.fold))
        for output in outputs:
            self.answer.on_report(self.answer.choices[choice], output)
        return self

    @property
    def events(self) -> list[Any]:
        return events_of(self.data)

    @property
    def whole(self) -> Any:
        return json.loads(whole_response(self.answer, self.fold, self.telling))


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


def test_a_stream_is_the_peers_to_the_letter() -> None:
    body = body_of(return_token_ids=True, stream_options={"include_usage": True})
    told = GeneratedChunks(body).push(say(72), say(105), stop(EOS))
    shared: dict[str, Any] = {
        "request_id": "generate-tokens-7",
        "system_fingerprint": MODEL.fingerprint,
    }
    shared |= {"output_mode": "tokens", "usage": None}
    last = {"weights_digest": DIGEST, "kv_transfer_params": None}
    part = {"index": 0, "finish_reason": None, "stop_reason": None, "logprobs": None, **NEVER}
    assert told.events == [
        {**shared, "prompt_token_ids": [1, 2, 3], "choices": [{**part, "token_ids": [72]}]},
        {**shared, "choices": [{**part, "token_ids": [105]}]},
        {**shared, **last, "choices": [{**part, "finish_reason": "stop", "token_ids": [EOS]}]},
        {
            **shared,
            **last,
            "choices": [],
            "usage": {
                "prompt_tokens": 3,
                "completion_tokens": 3,
                "total_tokens": 6,
                "prompt_tokens_details": {"cached_tokens": 2},
                "completion_tokens_details": None,
            },
        },
    ]


def test_a_whole_answer_is_the_peers_with_every_null_there_is() -> None:
    told = GeneratedChunks(body_of(model="scripted", return_token_ids=True)).push(
        say(72), stop(105, EOS)
    )
    assert told.whole == {
        "request_id": "generate-tokens-7",
        "model": "scripted",
        "created": told.telling.created,
        "system_fingerprint": MODEL.fingerprint,
        "weights_digest": DIGEST,
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": None,
        },
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": [1, 2, 3],
        **LATE,
        "kv_transfer_params": None,
        "output_mode": "tokens",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": [72, 105, EOS],
                **NEVER,
                "logprobs": None,
            }
        ],
    }


BODIES = {
    "plain": body_of(),
    "three": body_of({"n": 3}),
    "logprobs": body_of({"logprobs": 2}),
    "stop string": body_of({"stop": ["!"]}),
    "text": body_of(output_mode="text"),
    "text with logprobs": body_of({"logprobs": 1}, output_mode="text"),
    "usage": body_of(stream_options={"include_usage": True, "continuous_usage_stats": True}),
}


def news(token: int, logprobs: int | None) -> Output:
    told = [] if logprobs is None else [scripted_logprob(token, logprobs)]
    return say(token, logprobs=told)


@pytest.mark.parametrize("case", BODIES)
def test_chunks_join_to_the_whole_and_all_of_them_fit_the_documented_structs(case: str) -> None:
    body = BODIES[case]
    told = GeneratedChunks(body)
    for index in range(body.sampling_params.n or 1):
        tokens = [72, 0xC3, 0xA9, 33 + index]
        outputs = [news(token, body.sampling_params.logprobs) for token in tokens]
        told.push(*outputs, say(finish="length"), choice=index)
    text = body.output_mode == "text"
    for event in told.events:
        kind = GenerateTextChunk if text else GenerateChunk
        assert json.loads(msgspec.json.encode(msgspec.convert(event, kind))) == event
    whole_kind = GenerateTextResponse if text else GenerateResponse
    assert json.loads(msgspec.json.encode(msgspec.convert(told.whole, whole_kind))) == told.whole
    for choice in told.whole["choices"]:
        parts = [c for e in told.events for c in e["choices"] if c["index"] == choice["index"]]
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
    told = GeneratedChunks(body_of({"n": 2}, **fields)).push(say(1), say(2, 3), choice=1)
    told.data = b""
    told.push(say(*ids), choice=index)
    part = told.telling.part(told.answer.choices[index], OutputDelta([], ids))
    chunk = GenerateChunk(
        request_id="generate-tokens-7", system_fingerprint=MODEL.fingerprint, choices=[part]
    )
    assert told.data == b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def test_continuous_usage_is_of_its_own_choice_and_only_beside_the_usage_of_all() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = GeneratedChunks(body_of({"n": 2}, stream_options=options))
    told.push(say(1), choice=0).push(say(2), say(3), choice=1)
    told.push(stop(EOS), choice=0).push(stop(EOS), choice=1)
    counts = [event["usage"]["completion_tokens"] for event in told.events]
    assert counts == [1, 1, 2, 2, 3, 5]
    alone = GeneratedChunks(body_of(stream_options={"continuous_usage_stats": True})).push(
        say(1), stop(EOS)
    )
    assert [event["usage"] for event in alone.events] == [None, None]


def test_continuous_usage_counts_what_was_sent() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = GeneratedChunks(body_of(stream_options=options))
    told.answer.choices[0].num_generated = 7  # more than the client has been sent
    told.push(say(1), say(2), stop(EOS))
    assert [e["usage"]["completion_tokens"] for e in told.events[:-1]] == [1, 2, 3]


def test_a_stop_string_ends_the_tokens_too_and_is_named() -> None:
    told = GeneratedChunks(body_of({"stop": ["lo!"]})).push(*(say(i) for i in b"Hello! World"))
    assert [i for event in told.events for i in event["choices"][0]["token_ids"]] == list(b"Hello!")
    end = told.events[-1]["choices"][0]
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", "lo!")
    assert told.whole["choices"][0]["token_ids"] == list(b"Hello!")


def test_mode_text_omits_the_stop_string_and_sends_its_tokens() -> None:
    told = GeneratedChunks(body_of({"stop": ["lo!"]}, output_mode="text")).push(
        *(say(i) for i in b"Hello!")
    )
    (choice,) = told.whole["choices"]
    assert (choice["text"], choice["token_ids"]) == ("Hel", list(b"Hello!"))
    assert "".join(event["choices"][0]["text"] for event in told.events) == "Hel"


def test_a_stop_token_that_the_request_named_is_told_and_the_models_own_is_none() -> None:
    named = GeneratedChunks(body_of({"stop_token_ids": [9]})).push(stop(5, 9, stop_token=9))
    assert named.whole["choices"][0]["stop_reason"] == 9
    own = GeneratedChunks(body_of()).push(stop(5, EOS))
    assert own.whole["choices"][0]["stop_reason"] is None


ERROR = ErrorInfo(code="step_failed", message="the model's output was not a number")


@pytest.mark.parametrize("sampling", [{}, {"stop": ["x"]}], ids=["tokens", "text beside"])
@pytest.mark.parametrize("tokens", [[], [8]], ids=["empty", "with tokens"])
def test_an_error_is_told_once_and_last_also_where_its_news_are_empty(
    sampling: dict[str, Any], tokens: list[int]
) -> None:
    told = GeneratedChunks(body_of(sampling)).push(
        say(7), say(*tokens, finish="error", error=ERROR)
    )
    *parts, error = told.events
    assert [i for part in parts for i in part["choices"][0]["token_ids"]] == [7, *tokens]
    assert all(part["choices"][0]["finish_reason"] is None for part in parts)
    wanted = json.loads(error_body(fault_of(StepFailed(ERROR.message))))["error"]
    assert error["error"].keys() == wanted.keys()
    assert error["error"]["code"] == "step_failed"
    assert told.data.endswith(b"data: [DONE]\n\n")


def test_an_abort_ends_a_choice_as_any_end_does() -> None:
    told = GeneratedChunks(body_of()).push(say(7), say(finish="abort"))
    assert told.events[-1]["choices"][0]["finish_reason"] == "abort"
    assert told.whole["choices"][0]["token_ids"] == [7]


def test_fields_without_effect_are_named_once() -> None:
    told = GeneratedChunks(body_of(), ["mood"]).push(say(7), stop(EOS))
    assert [event.get("ignored_params") for event in told.events] == [["mood"], None]
    assert told.whole["ignored_params"] == ["mood"]


# ---- logprobs
def test_the_chosen_token_comes_first_then_by_rank_then_those_asked_for_each_once() -> None:
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


def test_both_distributions_stand_side_by_side_and_the_impossible_is_shown_as_it_is() -> None:
    drawn = [-0.1, -math.inf, -0.1, -math.inf]
    entry = TokenLogprobs(5, -2.0, 2, [8, 5], [-0.5, -2.0], [-7.0], drawn)
    told = json.loads(msgspec.json.encode(chosen_token(entry, [4])))
    assert (told["logprob"], told["sampling_logprob"]) == (-2.0, -0.1)
    beside = {top["token_id"]: top["sampling_logprob"] for top in told["top_logprobs"]}
    assert beside == {5: -0.1, 8: -9999.0, 4: -9999.0}


def test_prompt_logprobs_are_told_by_id_and_null_for_the_first() -> None:
    entries = [scripted_logprob(token, 1) for token in (2, 3)]
    told = GeneratedChunks(body_of({"prompt_logprobs": 1}))
    told.push(say(7, prompt_logprobs=entries), stop(EOS))
    first, second, third = told.whole["prompt_logprobs"]
    assert (first, list(second), list(third)) == (None, ["2"], ["3"])
    assert second["2"] == {"logprob": -2 / 64, "rank": 1, "decoded_token": "\x02"}


def test_mode_text_has_the_logprobs_of_a_chat() -> None:
    told = GeneratedChunks(body_of({"logprobs": 1}, output_mode="text"))
    told.push(say(72, logprobs=[scripted_logprob(72, 1)]), stop())
    (item,) = told.whole["choices"][0]["logprobs"]["content"]
    assert (item["token"], item["bytes"], item["top_logprobs"][0]["token"]) == ("H", [72], "H")


# ---- the reader of tokens alone
def test_tokens_alone_are_told_as_they_come_and_late_news_are_none() -> None:
    reader = TokenPassthrough([EOS])
    entry = scripted_logprob(8, 0)
    assert reader.push(say(8, logprobs=[entry])) == OutputDelta([], [8], [entry])
    assert not reader.push(say())
    assert reader.push(stop(9, EOS)) == OutputDelta([Finished("stop")], [9, EOS])
    assert reader.push(say(9, finish="error", error=ERROR)) == OutputDelta(num_after_end=1)
    failed = TokenPassthrough([EOS]).push(say(finish="error", error=ERROR))
    assert failed == OutputDelta([Failed(ERROR)])
