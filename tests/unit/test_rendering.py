"""Render and derender, field by field: what is told, what is refused, what a state weighs."""

from __future__ import annotations

import base64
import json
import math
from functools import partial
from typing import Any

import msgspec
import pytest

from gateway.api.openai.responses import ChatCompletion, CompletionResponse, TokenChance
from gateway.api.render.derender import ChatDerendering, CompletionDerendering
from gateway.api.render.recorded import prompt_entries, to_token_logprobs
from gateway.api.render.requests import MAX_STATE_CHARS, Carried, DerenderChat, DerenderCompletion
from gateway.api.render.responses import DerenderedChatPart
from gateway.api.render.stream_state import StreamState, key_of, opened, sealed
from gateway.api.tokens.requests import GenerateBody
from gateway.api.tokens.stream import chosen_token
from gateway.served_model import ServedModel
from gateway.text.logprobs import prompt_token_logprobs
from protocol.errors import ContextTooLong, InvalidRequest
from protocol.messages import Output, TokenLogprobs
from tests.support.cpu_time import best_cpu_s
from tests.support.http import fold_chat_response, fold_chat_stream, fold_response, fold_stream
from tests.support.rendering import CONFIG, Trip
from tests.support.scripted_engine import (
    EOS,
    ids_of,
    marked_ids,
    scripted_card,
    scripted_logprob,
    thinking_card,
)
from tests.support.served import served

MODEL = served(thinking_card())
HI = [{"role": "user", "content": "Hi"}]
LOOK = [{"type": "function", "function": {"name": "look"}}]
CALL = '<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'


def outputs(
    text: str, size: int = 3, *, logprobs: int | None = None, asked: int = 0
) -> list[Output]:
    """asked: of so many named tokens logprobs are told, too."""
    ids = [*marked_ids(text), EOS]
    pieces = [ids[at : at + size] for at in range(0, len(ids), size)]

    def entries(piece: list[int]) -> list[TokenLogprobs]:
        found = [scripted_logprob(token, logprobs or 0) for token in piece]
        heard = [-5.0 - place for place in range(asked)]
        return [msgspec.structs.replace(entry, asked_logprobs=heard) for entry in found]

    news = [
        Output(request=0, tokens=piece, logprobs=[] if logprobs is None else entries(piece))
        for piece in pieces
    ]
    return [*news[:-1], msgspec.structs.replace(news[-1], finish="stop", stop_token=EOS)]


def trip(text: str = "Hello", size: int = 3, **body: Any) -> Trip:
    logprobs = body.get("top_logprobs", body.get("logprobs"))
    lines = outputs(text, size, logprobs=logprobs, asked=len(body.get("logprob_token_ids", ())))
    given = {"model": "scripted", **body}
    return Trip(MODEL, given if "prompt" in body else {"messages": HI, **given}, lines)


# ---- render
def test_a_rendered_chat_is_a_body_of_the_token_endpoint_with_everything_resolved() -> None:
    body: dict[str, Any] = {
        "max_tokens": 7,
        "seed": 3,
        "stop": "x",
        "n": 2,
        "cache_salt": "s",
        "priority": -1,
    }
    told = trip(**body).render_chat(Carried({"do_remote_prefill": True}))
    decoded = msgspec.convert(told, GenerateBody)
    sampling = decoded.sampling_params
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 40, 1.0)
    assert (sampling.max_tokens, sampling.seed, sampling.n) == (7, 3, 2)
    assert sampling.stop_strings == ["x"]
    assert (decoded.cache_salt, decoded.priority, decoded.model) == ("s", -1, "scripted")
    assert told["kv_transfer_params"] == {"do_remote_prefill": True}
    assert told["request_id"] == "chatcmpl-7"
    assert decoded.token_ids[0] == 256


def test_without_max_tokens_none_is_told_as_whoever_generates_knows_the_context() -> None:
    assert "max_tokens" not in trip().render_chat()["sampling_params"]
    assert trip(prompt="a").render_completion()[0]["sampling_params"]["max_tokens"] == 16


@pytest.mark.parametrize(("kwargs", "ended"), [({}, False), ({"enable_thinking": False}, True)])
def test_whether_the_reasoning_has_ended_and_with_what_the_prompt_was_rendered(
    kwargs: dict[str, Any], ended: bool
) -> None:
    told = trip(chat_template_kwargs=kwargs).render_chat()
    assert told["reasoning_ended"] is ended
    assert told["reasoning_parser_kwargs"] == {"chat_template_kwargs": kwargs}


@pytest.mark.parametrize(
    "demand",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": LOOK, "tool_choice": "required"},
        {"thinking_token_budget": 5},
    ],
)
def test_what_must_be_enforced_is_a_grammar_that_the_token_endpoint_takes(
    demand: dict[str, Any],
) -> None:
    told = trip(**demand).render_chat()
    assert msgspec.convert(told, GenerateBody).grammar is not None
    assert "grammar" not in trip(tools=LOOK).render_chat()


def test_a_prompt_that_no_engine_takes_is_not_rendered() -> None:
    with pytest.raises(ContextTooLong) as raised:
        trip(messages=[{"role": "user", "content": "x" * 600}]).render_chat()
    assert raised.value.param == "prompt"


def test_a_completion_is_rendered_once_for_each_prompt() -> None:
    told = trip(prompt=["a", "bc"]).render_completion()
    assert [one["token_ids"] for one in told] == [ids_of("a"), ids_of("bc")]
    assert [one["request_id"] for one in told] == ["cmpl-7-0", "cmpl-7-1"]


# ---- completions, logprobs, n
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2, "return_token_ids": True},
        {"logprobs": 2, "logprob_token_ids": [65, 66]},
        {"stop": "ll"},
        {"stop": "ll", "include_stop_str_in_output": True, "logprobs": 1},
    ],
)
def test_a_completion_that_took_the_way_over_tokens_is_the_same(more: dict[str, Any]) -> None:
    one = trip("Hello, 語!", prompt=["a", "bc"], **more)
    whole, _ = one.completion()
    generated = [one.generate(rendered) for rendered in one.render_completion()]
    derendered = one.derender_completion([response for response, _ in generated])
    assert derendered["choices"] == whole["choices"]
    streamed: list[Any] = []
    for place, (_, chunks) in enumerate(generated):
        streamed += one.derender_stream(chunks, one.derender_completion_chunk, prompt_index=place)
    assert fold_stream(streamed) == fold_response(whole)


@pytest.mark.parametrize("stop", ["hm", "at", "ook", "absent"])
def test_a_stop_string_ends_what_it_ends_in_a_chat(stop: str) -> None:
    one = trip(f"<think>\nhm\n</think>\n\nI look.{CALL}", 1, tools=LOOK, stop=stop)
    whole, _ = one.chat()
    assert (whole["choices"][0]["stop_reason"] == stop) == (stop == "ook")
    response, chunks = one.generate(one.render_chat())
    assert without_ids(fold_chat_response(one.derender_chat(response))) == without_ids(
        fold_chat_response(whole)
    )
    streamed = one.derender_stream(chunks, one.derender_chat_chunk)
    assert without_ids(fold_chat_stream(streamed)) == without_ids(fold_chat_response(whole))
    told = response["choices"][0]
    assert (told["finish_reason"], told["stop_reason"]) == ("stop", stop if stop == "ook" else None)


def without_ids(said: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Ids of calls are drawn anew."""
    for choice in said.values():
        choice["calls"] = [call[1:] for call in choice["calls"]]
    return said


@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize("more", [{}, {"include_reasoning": False}, {"n": 2}])
def test_logprobs_and_ids_of_a_chat_survive(size: int, more: dict[str, Any]) -> None:
    text = "<think>\n" + "hm " * 40 + f"\n</think>\n\nI look.{CALL}"
    asked = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    one = trip(text, size, tools=LOOK, **asked, **more)
    whole, _ = one.chat()
    response, chunks = one.generate(one.render_chat())
    derendered = one.derender_chat(response)
    for choice, other in zip(whole["choices"], derendered["choices"], strict=True):
        assert other["logprobs"] == choice["logprobs"]
        assert other["token_ids"] == choice["token_ids"]
    streamed = one.derender_stream(chunks, one.derender_chat_chunk)
    assert [part["prompt_token_ids"] for part in streamed if "prompt_token_ids" in part] == [
        whole["prompt_token_ids"]
    ]
    for index, said in fold_stream(streamed).items():
        assert said["logprobs"] == whole["choices"][index]["logprobs"]
        assert said["token_ids"] == whole["choices"][index]["token_ids"]


@pytest.mark.parametrize(
    ("rank", "tops", "asked"),
    [
        (1, [(5, -0.1), (6, -2.0)], []),
        (2, [(6, -0.1), (5, -0.2)], []),
        (2, [(6, -0.1), (5, -0.1)], []),  # as likely
        (9, [(6, -0.1), (7, -0.2)], [8, 6]),
        (1, [(5, -0.1)], [8]),  # nothing else is possible
        (7, [], []),
    ],
)
def test_a_tokens_logprobs_come_back_as_the_engine_told_them(
    rank: int, tops: list[tuple[int, float]], asked: list[int]
) -> None:
    ids, logprobs = [i for i, _ in tops], [value for _, value in tops]
    own = dict(tops).get(5, -9.0)
    heard = [dict(tops).get(i, -4.0) for i in asked]
    entry = TokenLogprobs(5, own, rank, ids, logprobs, heard)
    assert to_token_logprobs(chosen_token(entry, asked), len(tops), asked) == entry


def test_a_named_token_of_which_nothing_was_told_is_unknown() -> None:
    entry = to_token_logprobs(chosen_token(TokenLogprobs(5, -1.0, 3), []), 0, [8])
    assert list(map(math.isnan, entry.asked_logprobs)) == [True]


def test_a_prompts_logprobs_come_back() -> None:
    entries = [
        TokenLogprobs(66, -0.5, 2, [65, 66], [-0.1, -0.5]),
        TokenLogprobs(67, -7.0, 90, [65, 66], [-0.1, -0.5]),
    ]
    told = json.loads(msgspec.json.encode(prompt_token_logprobs(MODEL.tokenizer, entries, 2)))
    typed = msgspec.convert(told, list[dict[str, TokenChance] | None])
    assert prompt_entries([64, 66, 67], typed, "x") == entries
    with pytest.raises(InvalidRequest, match="one item per prompt token"):
        prompt_entries([64, 66], typed, "x")


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": True, "return_token_ids": True, "return_effective_kwargs": True}]
)
def test_what_is_derendered_is_what_the_documentation_says(more: dict[str, Any]) -> None:
    one = trip(f"<think>\nhm\n</think>\n\nI look.{CALL}", tools=LOOK, **more)
    response, chunks = one.generate(one.render_chat())
    told = one.derender_chat(response | {"kv_transfer_params": {"a": 1}})
    assert msgspec.to_builtins(msgspec.convert(told, ChatCompletion)) == told
    for part in one.derender_stream(chunks, one.derender_chat_chunk):
        assert msgspec.to_builtins(msgspec.convert(part, DerenderedChatPart)) == part
    asked: dict[str, Any] = {"logprobs": 2} if more else {}
    other = trip(prompt="a", **asked)
    responses = [other.generate(rendered)[0] for rendered in other.render_completion()]
    whole = other.derender_completion(responses)
    assert msgspec.to_builtins(msgspec.convert(whole, CompletionResponse)) == whole


def test_kv_transfer_params_survive_whole_and_in_chunks() -> None:
    one = trip()
    response, chunks = one.generate(one.render_chat())
    params = {"remote_host": "h", "block_ids": [1]}
    assert (
        one.derender_chat(response | {"kv_transfer_params": params})["kv_transfer_params"] == params
    )
    chunks = [
        chunk | ({"kv_transfer_params": params} if "weights_digest" in chunk else {})
        for chunk in chunks
        if chunk["choices"]
    ]
    told = one.derender_stream(chunks, one.derender_chat_chunk)
    assert [part.get("kv_transfer_params") for part in told] == [None] * (len(told) - 1) + [params]


def test_the_usage_chunk_is_told_where_the_chat_asks_for_it() -> None:
    one = trip()
    _, chunks = one.generate(one.render_chat())
    assert one.derender_stream(chunks, one.derender_chat_chunk)[-1]["choices"] == []
    plain = one.derender_stream(
        chunks, one.derender_chat_chunk, chat_request={**one.body, "stream": True}
    )
    assert all(part["choices"] for part in plain)


def test_the_prompts_own_tokens_say_where_the_answer_starts() -> None:
    """Rendered again, the request says something else than the prompt that was sent."""
    one = trip("hm\n</think>\n\nSo.", chat_template_kwargs={"enable_thinking": False})
    response, chunks = one.generate(one.render_chat())
    inside = marked_ids("<user>Hi<assistant><think>\n")
    whole = one.derender_chat(response, prompt_token_ids=inside, prompt_tokens=len(inside))
    assert fold_chat_response(whole)[0]["reasoning"] == "hm"
    assert whole["usage"]["prompt_tokens"] == len(inside)
    streamed = one.derender_stream(chunks, one.derender_chat_chunk, prompt_token_ids=inside)
    assert fold_chat_stream(streamed) == fold_chat_response(whole)


# ---- without the request
PLAIN = served(scripted_card())
"""A model whose answers have no parts."""


def spoken_by_a_peer(text: str, **more: Any) -> dict[str, Any]:
    """A whole answer with no more in it than a peer has to say."""
    choice = {"index": 0, "token_ids": ids_of(text), "finish_reason": "stop", "logprobs": None}
    return {"request_id": "chatcmpl-7", "choices": [choice], "prompt_logprobs": None, **more}


def derendered(model: ServedModel = PLAIN, /, **body: Any) -> dict[str, Any]:
    decoded = msgspec.json.decode(msgspec.json.encode(body), type=DerenderChat)
    told: dict[str, Any] = json.loads(ChatDerendering(decoded, model, CONFIG).whole())
    return told


def derendered_texts(**body: Any) -> dict[str, Any]:
    decoded = msgspec.json.decode(msgspec.json.encode(body), type=DerenderCompletion)
    told: dict[str, Any] = json.loads(CompletionDerendering(decoded, PLAIN, CONFIG).whole())
    return told


def test_without_a_request_an_answer_is_its_text() -> None:
    told = derendered(generate_response=spoken_by_a_peer("Hello"))
    msgspec.convert(told, ChatCompletion)
    assert (told["id"], told["model"]) == ("chatcmpl-7", PLAIN.names[0])
    assert told["created"] > 0
    assert fold_chat_response(told)[0]["content"] == "Hello"
    usage = told["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (0, 5)
    assert (told["prompt_logprobs"], told["prompt_token_ids"]) == (None, None)
    told = derendered(generate_response=spoken_by_a_peer("Hello"), prompt_tokens=10)
    assert told["usage"]["total_tokens"] == 15
    usage = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    told = derendered(generate_response=spoken_by_a_peer("Hello", usage=usage))
    assert told["usage"]["prompt_tokens"] == 4
    told = derendered(
        generate_response=spoken_by_a_peer("Hello"), prompt_token_ids=[1, 2, 3], model="mine"
    )
    assert (told["usage"]["prompt_tokens"], told["model"]) == (3, "mine")


def test_without_a_request_what_came_is_told() -> None:
    entry = {"token_id": 72, "logprob": -1.0, "rank": 1}
    response = spoken_by_a_peer("H", prompt_logprobs=[None, None])
    top = {"token_id": 73, "logprob": -2.0, "rank": 2}
    response["choices"][0]["logprobs"] = {"content": [{**entry, "top_logprobs": [entry, top]}]}
    response["kv_transfer_params"] = {"key": "value"}
    told = derendered(generate_response=response)
    (item,) = told["choices"][0]["logprobs"]["content"]
    assert (item["token"], item["bytes"]) == ("H", [72])
    assert [top["token"] for top in item["top_logprobs"]] == ["H", "I"]
    assert told["prompt_logprobs"] == [None, None]
    assert told["kv_transfer_params"] == {"key": "value"}


def test_without_a_request_there_are_as_many_prompts_as_answers() -> None:
    responses = [spoken_by_a_peer("Hello", request_id="cmpl-7"), spoken_by_a_peer("World!")]
    told = derendered_texts(generate_responses=responses, prompt_tokens=[5, 10])
    msgspec.convert(told, CompletionResponse)
    assert [choice["text"] for choice in told["choices"]] == ["Hello", "World!"]
    assert [choice["prompt_logprobs"] for choice in told["choices"]] == [None, None]
    assert (told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"]) == (15, 11)
    told = derendered_texts(generate_responses=responses, prompt_token_ids=[None, [1, 2]])
    assert told["usage"]["prompt_tokens"] == 2


def test_without_a_request_a_stream_is_its_text() -> None:
    text, state, said = "né 語!", None, ""
    ids = ids_of(text)
    for place, token in enumerate(ids):
        choice = {"index": 0, "token_ids": [token]}
        if place == len(ids) - 1:
            choice["finish_reason"] = "length"
        chunk = {"request_id": "x", "prompt_token_ids": None, "usage": None, "choices": [choice]}
        body = {"stream": True, "generate_chunk": chunk, "stream_state": state}
        decoded = msgspec.json.decode(msgspec.json.encode(body), type=DerenderChat)
        told, state = ChatDerendering(decoded, PLAIN, CONFIG).chunk()
        for part in told["choices"] if told else ():
            said += part["delta"].get("content", "")
    assert said == text
    assert told is not None
    assert told["choices"][0]["finish_reason"] == "length"


def test_without_a_request_choices_of_a_stream_are_known_when_they_come() -> None:
    said, state = {0: "", 2: ""}, None
    for index, token in [(2, 72), (0, 65), (2, 105)]:
        chunk = {"request_id": "x", "choices": [{"index": index, "token_ids": [token]}]}
        body = {"stream": True, "generate_chunk": chunk, "stream_state": state}
        decoded = msgspec.json.decode(msgspec.json.encode(body), type=DerenderCompletion)
        told, state = CompletionDerendering(decoded, PLAIN, CONFIG).chunk()
        assert told is not None
        (part,) = told["choices"]
        said[part["index"]] += part["text"]
    assert said == {0: "A", 2: "Hi"}


@pytest.mark.parametrize(
    ("model", "change", "field"),
    [
        (MODEL, {}, "chat_request"),
        (PLAIN, {"generate_response": None}, "generate_response"),
        (PLAIN, {"stream": True}, "generate_chunk"),
        (
            PLAIN,
            {"generate_response": spoken_by_a_peer("H") | {"choices": []}},
            "generate_response.choices",
        ),
        (
            PLAIN,
            {
                "generate_response": spoken_by_a_peer("H")
                | {"choices": [{"index": 1 << 20, "token_ids": [1], "finish_reason": "stop"}]}
            },
            "generate_response",
        ),
    ],
)
def test_what_is_wrong_without_a_request_is_named(
    model: ServedModel, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        derendered(model, **{"generate_response": spoken_by_a_peer("H"), **change})
    assert raised.value.param == field


def test_no_responses_are_no_completion() -> None:
    with pytest.raises(InvalidRequest) as raised:
        derendered_texts(generate_responses=[])
    assert raised.value.param == "generate_responses"


# ---- what is wrong
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"generate_response": None}, "generate_response"),
        ({"prompt_token_ids": [1, 99999]}, "prompt_token_ids[1]"),
        ({"prompt_tokens": 5}, "prompt_tokens"),
        ({"chat_request": {"messages": HI, "n": 2}}, "generate_response.choices"),
        ({"chat_request": {"messages": HI, "n": 999}}, "chat_request.n"),
        ({"chat_request": {"messages": HI, "top_logprobs": 1}}, "chat_request.top_logprobs"),
        ({"chat_request": {"messages": ["x"]}}, "chat_request.messages[0]"),
        (
            {"chat_request": {"messages": HI, "logprobs": True}},
            "generate_response.choices[0].logprobs",
        ),
    ],
)
def test_what_is_wrong_with_a_whole_answer_is_named(change: dict[str, Any], field: str) -> None:
    one = trip()
    response, _ = one.generate(one.render_chat())
    body = {"chat_request": one.body, "generate_response": response} | change
    decoded = msgspec.json.decode(msgspec.json.encode(body), type=DerenderChat)
    with pytest.raises(InvalidRequest) as raised:
        ChatDerendering(decoded, MODEL, CONFIG).whole()
    assert raised.value.param == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": [263]}, "token_ids[0]"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"finish_reason": None}, "finish_reason"),
    ],
)
def test_what_is_wrong_with_a_choice_is_named(change: dict[str, Any], field: str) -> None:
    one = trip()
    response, _ = one.generate(one.render_chat())
    response["choices"][0] |= change
    with pytest.raises(InvalidRequest) as raised:
        one.derender_chat(response)
    assert raised.value.param == f"generate_response.choices[0].{field}"


def test_a_chunk_of_an_answer_that_nobody_asked_for_is_refused() -> None:
    one = trip()
    _, chunks = one.generate(one.render_chat())
    chunks[0]["choices"][0]["index"] = 1
    with pytest.raises(InvalidRequest) as raised:
        one.derender_chat_chunk(chunks[0], None)
    assert raised.value.param == "generate_chunk.choices[0].index"


# ---- the state
def after(one: Trip, count: int) -> tuple[str, list[Any]]:
    """The state behind so many chunks, and the chunks that follow."""
    _, chunks = one.generate(one.render_chat())
    state = None
    for chunk in chunks[:count]:
        _, state = one.derender_chat_chunk(chunk, state)
    assert state is not None
    return state, chunks[count:]


def refuses(one: Trip, chunk: Any, state: str) -> bool:
    """Any other failure is one of the test."""
    try:
        one.derender_chat_chunk(chunk, state)
    except InvalidRequest as error:
        return error.param == "stream_state"
    return False


def test_a_state_that_is_damaged_or_of_another_answer_is_refused() -> None:
    one = trip(f"I look.{CALL}", tools=LOOK)
    state, (chunk, *_) = after(one, 4)
    data = bytearray(base64.urlsafe_b64decode(state))
    data[-1] ^= 1
    for odd in (
        "",
        "x",
        "é",
        "AAAA",
        state[:-4],
        state[4:],
        base64.urlsafe_b64encode(data).decode(),
    ):
        assert refuses(one, chunk, odd)
    other = Trip(MODEL, {**one.body, "tool_choice": "none"}, one.outputs)
    assert refuses(other, chunk, state)


def test_a_state_that_someone_forged_is_refused_and_never_our_fault() -> None:
    one = trip(f"<think>\nhm\n</think>\n\nI look.{CALL}", tools=LOOK)
    state, (chunk, *_) = after(one, 8)
    request = msgspec.json.decode(
        msgspec.json.encode({"chat_request": one.streaming}), type=DerenderChat
    ).chat_request
    key = key_of(MODEL, request)
    plain = msgspec.to_builtins(opened(state, key))
    machine = plain[4][0][0]["machine"]
    noticed = 0
    for name, odd in (("at", "nowhere"), ("at", 3), ("teller", 3), ("section", []), ("zzz", 1)):
        kept = machine.get(name)
        machine[name] = odd
        text = sealed(msgspec.convert(plain, StreamState), key)
        noticed += refuses(one, chunk, text)
        machine[name] = kept
    assert noticed >= 3  # the others are read as if they were true
    plain[4][7] = plain[4][0]  # of a choice that the request does not have
    assert refuses(one, chunk, sealed(msgspec.convert(plain, StreamState), key))


def size_and_seconds(one: Trip, text: str, num_chunks: int) -> tuple[int, float]:
    """Of the state behind `text`, and of one chunk more: the best of a few."""
    state = None
    ids = marked_ids(text)
    step = max(1, len(ids) // num_chunks)
    for at in range(0, len(ids), step):
        chunk = news(ids[at : at + step])
        _, state = one.derender_chat_chunk(chunk, state)
    assert state is not None
    one_more = partial(one.derender_chat_chunk, news(ids_of("x")), state)
    return len(state), best_cpu_s(one_more, tries=25)


def news(ids: list[int]) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": ids, "finish_reason": None, "stop_reason": None}
    return {"request_id": "generate-tokens-7", "output_mode": "tokens", "choices": [choice]}


LONG = {
    "content": ("Well, ", "so on. "),
    "reasoning": ("<think>\nWell, ", "so on. "),
    "arguments": ('<tool_call>{"name": "look", "arguments": {"at": "', "so on. "),
    "nested arguments": ('<tool_call>{"name": "look", "arguments": {"at": [', '{"a": [1, ""]}, '),
    "many calls": ("", CALL),
}


@pytest.mark.parametrize("more", [{}, {"include_reasoning": False, "return_token_ids": True}])
@pytest.mark.parametrize("kind", LONG)
def test_a_chunk_costs_the_same_wherever_it_stands(kind: str, more: dict[str, Any]) -> None:
    """At 100 tokens and at 10,000, in what is sent and in time."""
    head, part = LONG[kind]
    one = trip(tools=LOOK, **more)
    size = len(marked_ids(part))
    short = size_and_seconds(one, head + part * (100 // size), 20)
    long = size_and_seconds(one, head + part * (10_000 // size), 50)
    print(f"{kind}: {short[0]} -> {long[0]} chars, {short[1] * 1e6:.0f} -> {long[1] * 1e6:.0f} us")
    assert long[0] <= short[0] * 1.25 + 400
    assert long[1] <= short[1] * 2


def test_what_is_held_back_without_end_is_refused_and_can_be_derendered_whole() -> None:
    held = '<tool_call>{"arguments": {"at": "' + "x" * MAX_STATE_CHARS
    with pytest.raises(InvalidRequest) as raised:
        trip(tools=LOOK).derender_chat_chunk(news(marked_ids(held)), None)
    assert raised.value.param == "generate_chunk"
    one = trip(held, 4096, tools=LOOK)
    response, _ = one.generate(one.render_chat())
    assert fold_chat_response(one.derender_chat(response))[0]["warnings"] == ["tool_parse_failed"]
