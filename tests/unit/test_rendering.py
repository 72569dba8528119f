"""Render and derender: the fields, the refusals, and the size of a stream's state."""

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
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import Output
from protocol.wire.errors import ContextTooLong, InvalidRequest
from tests.support.http import fold_chat_response, fold_chat_stream, fold_response, fold_stream
from tests.support.line_count import executed_lines
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
    text: str, size: int = 3, *, logprobs: int | None = None, num_logprob_ids: int = 0
) -> list[Output]:
    """Return the engine's outputs of a text, `size` tokens each.

    logprobs          number of top tokens with logprobs; None: no logprobs at all
    num_logprob_ids   number of requested token ids, whose logprobs are added
    """
    ids = [*marked_ids(text), EOS]
    pieces = [ids[at : at + size] for at in range(0, len(ids), size)]

    def entries(piece: list[int]) -> list[TokenLogprobs]:
        found = [scripted_logprob(token, logprobs or 0) for token in piece]
        asked_logprobs = [-5.0 - place for place in range(num_logprob_ids)]
        return [msgspec.structs.replace(entry, asked_logprobs=asked_logprobs) for entry in found]

    news = [
        Output(request=0, tokens=piece, logprobs=[] if logprobs is None else entries(piece))
        for piece in pieces
    ]
    return [*news[:-1], msgspec.structs.replace(news[-1], finish="stop", stop_token=EOS)]


def trip(text: str = "Hello", size: int = 3, **body: Any) -> Trip:
    logprobs = body.get("top_logprobs", body.get("logprobs"))
    lines = outputs(
        text, size, logprobs=logprobs, num_logprob_ids=len(body.get("logprob_token_ids", ()))
    )
    given = {"model": "scripted", **body}
    return Trip(MODEL, given if "prompt" in body else {"messages": HI, **given}, lines)


# ---- render
def test_a_rendered_chat_is_a_complete_body_of_the_token_endpoint() -> None:
    body: dict[str, Any] = {
        "max_tokens": 7,
        "seed": 3,
        "stop": "x",
        "n": 2,
        "cache_salt": "s",
        "priority": -1,
    }
    result = trip(**body).render_chat(Carried({"do_remote_prefill": True}))
    decoded = msgspec.convert(result, GenerateBody)
    sampling = decoded.sampling_params
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 40, 1.0)
    assert (sampling.max_tokens, sampling.seed, sampling.n) == (7, 3, 2)
    assert sampling.stop_strings == ["x"]
    assert (decoded.cache_salt, decoded.priority, decoded.model) == ("s", -1, "scripted")
    assert result["kv_transfer_params"] == {"do_remote_prefill": True}
    assert result["request_id"] == "chatcmpl-7"
    assert decoded.token_ids[0] == 256


def test_max_tokens_is_absent_if_the_chat_does_not_set_it() -> None:
    assert "max_tokens" not in trip().render_chat()["sampling_params"]
    assert trip(prompt="a").render_completion()[0]["sampling_params"]["max_tokens"] == 16


@pytest.mark.parametrize(("kwargs", "ended"), [({}, False), ({"enable_thinking": False}, True)])
def test_a_rendered_chat_has_the_state_of_reasoning_and_the_template_arguments(
    kwargs: dict[str, Any], ended: bool
) -> None:
    result = trip(chat_template_kwargs=kwargs).render_chat()
    assert result["reasoning_ended"] is ended
    assert result["reasoning_parser_kwargs"] == {"chat_template_kwargs": kwargs}


@pytest.mark.parametrize(
    "demand",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": LOOK, "tool_choice": "required"},
        {"thinking_token_budget": 5},
    ],
)
def test_a_constraint_becomes_a_grammar_of_the_token_endpoint(demand: dict[str, Any]) -> None:
    result = trip(**demand).render_chat()
    assert msgspec.convert(result, GenerateBody).grammar is not None
    assert "grammar" not in trip(tools=LOOK).render_chat()


def test_a_prompt_that_exceeds_the_context_is_not_rendered() -> None:
    with pytest.raises(ContextTooLong) as raised:
        trip(messages=[{"role": "user", "content": "x" * 600}]).render_chat()
    assert raised.value.param == "prompt"


def test_a_completion_is_rendered_once_for_each_prompt() -> None:
    result = trip(prompt=["a", "bc"]).render_completion()
    assert [one["token_ids"] for one in result] == [ids_of("a"), ids_of("bc")]
    assert [one["request_id"] for one in result] == ["cmpl-7-0", "cmpl-7-1"]


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
def test_a_derendered_completion_equals_a_direct_one(more: dict[str, Any]) -> None:
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
def test_a_stop_string_ends_a_derendered_chat_like_a_direct_one(stop: str) -> None:
    one = trip(f"<think>\nhm\n</think>\n\nI look.{CALL}", 1, tools=LOOK, stop=stop)
    whole, _ = one.chat()
    assert (whole["choices"][0]["stop_reason"] == stop) == (stop == "ook")
    response, chunks = one.generate(one.render_chat())
    assert without_ids(fold_chat_response(one.derender_chat(response))) == without_ids(
        fold_chat_response(whole)
    )
    streamed = one.derender_stream(chunks, one.derender_chat_chunk)
    assert without_ids(fold_chat_stream(streamed)) == without_ids(fold_chat_response(whole))
    result = response["choices"][0]
    assert (result["finish_reason"], result["stop_reason"]) == (
        "stop",
        stop if stop == "ook" else None,
    )


def without_ids(choices: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the choices without the ids of calls, which are random."""
    for choice in choices.values():
        choice["calls"] = [call[1:] for call in choice["calls"]]
    return choices


@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize("more", [{}, {"include_reasoning": False}, {"n": 2}])
def test_logprobs_and_token_ids_of_a_chat_survive(size: int, more: dict[str, Any]) -> None:
    text = "<think>\n" + "hm " * 40 + f"\n</think>\n\nI look.{CALL}"
    options = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    one = trip(text, size, tools=LOOK, **options, **more)
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
    for index, choice in fold_stream(streamed).items():
        assert choice["logprobs"] == whole["choices"][index]["logprobs"]
        assert choice["token_ids"] == whole["choices"][index]["token_ids"]


@pytest.mark.parametrize(
    ("rank", "tops", "extra_ids"),
    [
        (1, [(5, -0.1), (6, -2.0)], []),
        (2, [(6, -0.1), (5, -0.2)], []),
        (2, [(6, -0.1), (5, -0.1)], []),  # as likely
        (9, [(6, -0.1), (7, -0.2)], [8, 6]),
        (1, [(5, -0.1)], [8]),  # nothing else is possible
        (7, [], []),
    ],
)
def test_the_engines_logprobs_of_a_token_are_restored(
    rank: int, tops: list[tuple[int, float]], extra_ids: list[int]
) -> None:
    ids, logprobs = [i for i, _ in tops], [value for _, value in tops]
    own = dict(tops).get(5, -9.0)
    asked_logprobs = [dict(tops).get(i, -4.0) for i in extra_ids]
    entry = TokenLogprobs(5, own, rank, ids, logprobs, asked_logprobs)
    assert to_token_logprobs(chosen_token(entry, extra_ids), len(tops), extra_ids) == entry


def test_a_missing_logprob_of_a_requested_token_is_nan() -> None:
    entry = to_token_logprobs(chosen_token(TokenLogprobs(5, -1.0, 3), []), 0, [8])
    assert list(map(math.isnan, entry.asked_logprobs)) == [True]


def test_the_engines_logprobs_of_a_prompt_are_restored() -> None:
    entries = [
        TokenLogprobs(66, -0.5, 2, [65, 66], [-0.1, -0.5]),
        TokenLogprobs(67, -7.0, 90, [65, 66], [-0.1, -0.5]),
    ]
    result = json.loads(msgspec.json.encode(prompt_token_logprobs(MODEL.tokenizer, entries, 2)))
    typed = msgspec.convert(result, list[dict[str, TokenChance] | None])
    assert prompt_entries([64, 66, 67], typed, "x") == entries
    with pytest.raises(InvalidRequest, match="one item per prompt token"):
        prompt_entries([64, 66], typed, "x")


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": True, "return_token_ids": True, "return_effective_kwargs": True}]
)
def test_derendered_responses_match_the_documented_structs(more: dict[str, Any]) -> None:
    one = trip(f"<think>\nhm\n</think>\n\nI look.{CALL}", tools=LOOK, **more)
    response, chunks = one.generate(one.render_chat())
    result = one.derender_chat(response | {"kv_transfer_params": {"a": 1}})
    assert msgspec.to_builtins(msgspec.convert(result, ChatCompletion)) == result
    for part in one.derender_stream(chunks, one.derender_chat_chunk):
        assert msgspec.to_builtins(msgspec.convert(part, DerenderedChatPart)) == part
    options: dict[str, Any] = {"logprobs": 2} if more else {}
    other = trip(prompt="a", **options)
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
    result = one.derender_stream(chunks, one.derender_chat_chunk)
    assert [part.get("kv_transfer_params") for part in result] == [None] * (len(result) - 1) + [
        params
    ]


def test_the_usage_chunk_is_sent_only_if_the_chat_requests_usage() -> None:
    one = trip()
    _, chunks = one.generate(one.render_chat())
    assert one.derender_stream(chunks, one.derender_chat_chunk)[-1]["choices"] == []
    plain = one.derender_stream(
        chunks, one.derender_chat_chunk, chat_request={**one.body, "stream": True}
    )
    assert all(part["choices"] for part in plain)


def test_the_prompts_token_ids_decide_how_the_answer_starts() -> None:
    """The prompt that the client sends differs from the one that the chat request would render."""
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
"""A model whose answers have no reasoning and no tool calls."""


def minimal_response(text: str, **more: Any) -> dict[str, Any]:
    """Return a complete response with only the members that vLLM always sends."""
    choice = {"index": 0, "token_ids": ids_of(text), "finish_reason": "stop", "logprobs": None}
    return {"request_id": "chatcmpl-7", "choices": [choice], "prompt_logprobs": None, **more}


def derendered(model: ServedModel = PLAIN, /, **body: Any) -> dict[str, Any]:
    decoded = msgspec.json.decode(msgspec.json.encode(body), type=DerenderChat)
    result: dict[str, Any] = json.loads(ChatDerendering(decoded, model, CONFIG).whole())
    return result


def derendered_texts(**body: Any) -> dict[str, Any]:
    decoded = msgspec.json.decode(msgspec.json.encode(body), type=DerenderCompletion)
    result: dict[str, Any] = json.loads(CompletionDerendering(decoded, PLAIN, CONFIG).whole())
    return result


def test_without_a_request_all_text_is_content() -> None:
    result = derendered(generate_response=minimal_response("Hello"))
    msgspec.convert(result, ChatCompletion)
    assert (result["id"], result["model"]) == ("chatcmpl-7", PLAIN.names[0])
    assert result["created"] > 0
    assert fold_chat_response(result)[0]["content"] == "Hello"
    usage = result["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (0, 5)
    assert (result["prompt_logprobs"], result["prompt_token_ids"]) == (None, None)
    result = derendered(generate_response=minimal_response("Hello"), prompt_tokens=10)
    assert result["usage"]["total_tokens"] == 15
    usage = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    result = derendered(generate_response=minimal_response("Hello", usage=usage))
    assert result["usage"]["prompt_tokens"] == 4
    result = derendered(
        generate_response=minimal_response("Hello"), prompt_token_ids=[1, 2, 3], model="mine"
    )
    assert (result["usage"]["prompt_tokens"], result["model"]) == (3, "mine")


def test_without_a_request_all_members_of_the_response_are_kept() -> None:
    entry = {"token_id": 72, "logprob": -1.0, "rank": 1}
    response = minimal_response("H", prompt_logprobs=[None, None])
    top = {"token_id": 73, "logprob": -2.0, "rank": 2}
    response["choices"][0]["logprobs"] = {"content": [{**entry, "top_logprobs": [entry, top]}]}
    response["kv_transfer_params"] = {"key": "value"}
    result = derendered(generate_response=response)
    (item,) = result["choices"][0]["logprobs"]["content"]
    assert (item["token"], item["bytes"]) == ("H", [72])
    assert [top["token"] for top in item["top_logprobs"]] == ["H", "I"]
    assert result["prompt_logprobs"] == [None, None]
    assert result["kv_transfer_params"] == {"key": "value"}


def test_without_a_request_there_is_one_prompt_per_response() -> None:
    responses = [minimal_response("Hello", request_id="cmpl-7"), minimal_response("World!")]
    result = derendered_texts(generate_responses=responses, prompt_tokens=[5, 10])
    msgspec.convert(result, CompletionResponse)
    assert [choice["text"] for choice in result["choices"]] == ["Hello", "World!"]
    assert [choice["prompt_logprobs"] for choice in result["choices"]] == [None, None]
    assert (result["usage"]["prompt_tokens"], result["usage"]["completion_tokens"]) == (15, 11)
    result = derendered_texts(generate_responses=responses, prompt_token_ids=[None, [1, 2]])
    assert result["usage"]["prompt_tokens"] == 2


def test_without_a_request_all_text_of_a_stream_is_content() -> None:
    text, state, content = "né 語!", None, ""
    ids = ids_of(text)
    for place, token in enumerate(ids):
        choice = {"index": 0, "token_ids": [token]}
        if place == len(ids) - 1:
            choice["finish_reason"] = "length"
        chunk = {"request_id": "x", "prompt_token_ids": None, "usage": None, "choices": [choice]}
        body = {"stream": True, "generate_chunk": chunk, "stream_state": state}
        decoded = msgspec.json.decode(msgspec.json.encode(body), type=DerenderChat)
        result, state = ChatDerendering(decoded, PLAIN, CONFIG).chunk()
        for part in result["choices"] if result else ():
            content += part["delta"].get("content", "")
    assert content == text
    assert result is not None
    assert result["choices"][0]["finish_reason"] == "length"


def test_without_a_request_a_stream_may_add_choices() -> None:
    texts, state = {0: "", 2: ""}, None
    for index, token in [(2, 72), (0, 65), (2, 105)]:
        chunk = {"request_id": "x", "choices": [{"index": index, "token_ids": [token]}]}
        body = {"stream": True, "generate_chunk": chunk, "stream_state": state}
        decoded = msgspec.json.decode(msgspec.json.encode(body), type=DerenderCompletion)
        result, state = CompletionDerendering(decoded, PLAIN, CONFIG).chunk()
        assert result is not None
        (part,) = result["choices"]
        texts[part["index"]] += part["text"]
    assert texts == {0: "A", 2: "Hi"}


@pytest.mark.parametrize(
    ("model", "change", "field"),
    [
        (MODEL, {}, "chat_request"),
        (PLAIN, {"generate_response": None}, "generate_response"),
        (PLAIN, {"stream": True}, "generate_chunk"),
        (
            PLAIN,
            {"generate_response": minimal_response("H") | {"choices": []}},
            "generate_response.choices",
        ),
        (
            PLAIN,
            {
                "generate_response": minimal_response("H")
                | {"choices": [{"index": 1 << 20, "token_ids": [1], "finish_reason": "stop"}]}
            },
            "generate_response",
        ),
    ],
)
def test_without_a_request_an_error_names_the_field(
    model: ServedModel, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        derendered(model, **{"generate_response": minimal_response("H"), **change})
    assert raised.value.param == field


def test_a_completion_without_responses_is_refused() -> None:
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
def test_an_error_in_a_complete_response_names_the_field(
    change: dict[str, Any], field: str
) -> None:
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
def test_an_error_in_a_choice_names_the_field(change: dict[str, Any], field: str) -> None:
    one = trip()
    response, _ = one.generate(one.render_chat())
    response["choices"][0] |= change
    with pytest.raises(InvalidRequest) as raised:
        one.derender_chat(response)
    assert raised.value.param == f"generate_response.choices[0].{field}"


def test_a_chunk_of_an_unknown_choice_is_refused() -> None:
    one = trip()
    _, chunks = one.generate(one.render_chat())
    chunks[0]["choices"][0]["index"] = 1
    with pytest.raises(InvalidRequest) as raised:
        one.derender_chat_chunk(chunks[0], None)
    assert raised.value.param == "generate_chunk.choices[0].index"


# ---- the state
def after(one: Trip, count: int) -> tuple[str, list[Any]]:
    """Return the state after `count` chunks, and the chunks that follow."""
    _, chunks = one.generate(one.render_chat())
    state = None
    for chunk in chunks[:count]:
        _, state = one.derender_chat_chunk(chunk, state)
    assert state is not None
    return state, chunks[count:]


def refuses(one: Trip, chunk: Any, state: str) -> bool:
    """Return whether the chunk is refused because of `state`. An exception that is not an
    InvalidRequest is raised."""
    try:
        one.derender_chat_chunk(chunk, state)
    except InvalidRequest as error:
        return error.param == "stream_state"
    return False


def test_a_damaged_state_or_that_of_another_request_is_refused() -> None:
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


def test_a_forged_state_is_refused_and_never_an_internal_error() -> None:
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
    assert noticed >= 3  # the other forged states are accepted
    plain[4][7] = plain[4][0]  # of a choice that the request does not have
    assert refuses(one, chunk, sealed(msgspec.convert(plain, StreamState), key))


def size_and_lines(one: Trip, text: str, num_chunks: int) -> tuple[int, int]:
    """Return the size of the state after `text`, sent in about `num_chunks` chunks, and the number
    of lines that one more chunk executes."""
    state = None
    ids = marked_ids(text)
    step = max(1, len(ids) // num_chunks)
    for at in range(0, len(ids), step):
        chunk = chunk_of(ids[at : at + step])
        _, state = one.derender_chat_chunk(chunk, state)
    assert state is not None
    one_more = partial(one.derender_chat_chunk, chunk_of(ids_of("x")), state)
    one_more()  # fills caches
    return len(state), executed_lines(one_more)


def chunk_of(ids: list[int]) -> dict[str, Any]:
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
def test_the_cost_of_a_chunk_does_not_depend_on_its_position(
    kind: str, more: dict[str, Any]
) -> None:
    """Compare the size of the state and the executed lines after 100 tokens and after 10,000."""
    head, part = LONG[kind]
    one = trip(tools=LOOK, **more)
    size = len(marked_ids(part))
    short = size_and_lines(one, head + part * (100 // size), 20)
    long = size_and_lines(one, head + part * (10_000 // size), 50)
    print(f"{kind}: {short[0]} -> {long[0]} chars, {short[1]} -> {long[1]} lines")
    assert long[0] <= short[0] * 1.25 + 400
    assert 0 < long[1] <= short[1] * 1.1


def test_a_stream_that_holds_back_too_much_is_refused_but_not_the_complete_response() -> None:
    held = '<tool_call>{"arguments": {"at": "' + "x" * MAX_STATE_CHARS
    with pytest.raises(InvalidRequest) as raised:
        trip(tools=LOOK).derender_chat_chunk(chunk_of(marked_ids(held)), None)
    assert raised.value.param == "generate_chunk"
    one = trip(held, 4096, tools=LOOK)
    response, _ = one.generate(one.render_chat())
    assert fold_chat_response(one.derender_chat(response))[0]["warnings"] == ["tool_parse_failed"]
