"""Streams as a client receives them: their order, their bytes, and the whole answer they add up
to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
import requests

from gateway.api.openai.responses import ChatChunk, ChatCompletion
from gateway.http.sse import KEEP_ALIVE
from protocol.engine.messages import Generate
from protocol.wire.errors import Overloaded
from tests.support.gateway_process import GatewayProcess
from tests.support.http import events_of, exchange, fold_response, fold_stream, json_of
from tests.support.scripted_engine import (
    Reply,
    ScriptedEngine,
    TokenReply,
    ids_of,
    scripted_card,
    text_of,
    text_reply,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
PYWSGI = """
from gevent import monkey; monkey.patch_all()
import logging; logging.basicConfig(level="INFO")
from gevent.pywsgi import WSGIServer
from gateway.app import create_app
from protocol.config.gateway import GatewayConfig
port = GatewayConfig.from_environment().port
WSGIServer(("127.0.0.1", port), create_app(), log=None).serve_forever()
"""


GATEWAY = {"keep_alive_s": 0.2}


@pytest.fixture(scope="module")
def pywsgi(engine: ScriptedEngine) -> Iterator[GatewayProcess]:
    with GatewayProcess(command=["-c", PYWSGI], engine=engine.address) as gateway:
        yield gateway.await_ready()


def stream(gateway: GatewayProcess, path: str, body: dict[str, Any], **options: Any) -> list[Any]:
    status, headers, data = exchange(gateway.port, path, {**body, "stream": True}, **options)
    assert status == 200, data
    assert headers["content-type"].startswith("text/event-stream")
    return events_of(data)


def test_a_chat_stream_is_role_then_content_then_finish_then_usage(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("abc")
    body = {"messages": HI, "stream_options": {"include_usage": True}}
    events = stream(gateway, CHAT, body, headers={"X-Request-Id": "mine"})
    shared = {name: events[0][name] for name in ("created", "model", "system_fingerprint")}
    for event in events:
        assert event["id"] == "chatcmpl-mine"
        assert event["object"] == "chat.completion.chunk"
        assert event["service_tier"] == "default"
        assert shared.items() <= event.items()
    result = [(e["choices"][0]["delta"], e["choices"][0]["finish_reason"]) for e in events[:-1]]
    assert result == [
        ({"role": "assistant", "content": "", "refusal": None}, None),
        ({"content": "a"}, None),
        ({"content": "b"}, None),
        ({"content": "c"}, None),
        ({}, "stop"),
    ]
    assert [event["usage"] for event in events[:-1]] == [None] * 5
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": 21,
        "completion_tokens": 4,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_without_include_usage_no_chunk_has_usage(gateway: GatewayProcess) -> None:
    assert all("usage" not in event for event in stream(gateway, CHAT, {"messages": HI}))


@pytest.mark.parametrize("body", [{"prompt": "p"}, {"messages": HI}], ids=["text", "chat"])
def test_continuous_usage_counts_up_with_the_text(
    body: dict[str, Any], gateway: GatewayProcess
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    path = CHAT if "messages" in body else COMPLETIONS
    events = stream(gateway, path, {**body, "stream_options": options, "return_token_ids": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    sent = [len(ids) for e in events for c in e["choices"] for ids in [c.get("token_ids", [])]]
    assert counts == [sum(sent[: place + 1]) for place in range(len(sent))] + [14]


@pytest.mark.parametrize("options", [{"include_usage": False}, {}], ids=["false", "absent"])
@pytest.mark.parametrize("body", [{"prompt": "p"}, {"messages": HI}], ids=["text", "chat"])
def test_continuous_usage_needs_include_usage(
    body: dict[str, Any], options: dict[str, Any], gateway: GatewayProcess
) -> None:
    path = CHAT if "messages" in body else COMPLETIONS
    body = {**body, "stream_options": {**options, "continuous_usage_stats": True}}
    assert all("usage" not in event for event in stream(gateway, path, body))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": HI}),
    "chat with logprobs": (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2}),
    "chat with ids": (CHAT, {"messages": HI, "return_token_ids": True}),
    "chat, three answers": (CHAT, {"messages": HI, "n": 3, "seed": 5}),
    "chat, stop string": (CHAT, {"messages": HI, "stop": ["nowhere", "o, w"], "logprobs": True}),
    "chat, stop included": (
        CHAT,
        {"messages": HI, "stop": "lo", "include_stop_str_in_output": True},
    ),
    "chat, length": (CHAT, {"messages": HI, "max_completion_tokens": 3}),
    "text": (COMPLETIONS, {"prompt": "Say:"}),
    "text, four prompts": (COMPLETIONS, {"prompt": ["a", "b", "c", "d"], "n": 2}),
    "text with logprobs": (COMPLETIONS, {"prompt": [72, 105], "logprobs": 1}),
    "text with ids": (COMPLETIONS, {"prompt": [[72], [105]], "return_token_ids": True}),
    "text, echo": (COMPLETIONS, {"prompt": "Say:", "echo": True}),
    "text, echo with logprobs": (COMPLETIONS, {"prompt": "Say:", "echo": True, "logprobs": 2}),
    "text, score": (COMPLETIONS, {"prompt": "Say:", "echo": True, "logprobs": 0, "max_tokens": 0}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_whole_answer_is_the_stream_folded(
    case: str, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    path, body = CASES[case]
    engine.script = lambda generate: text_reply(f"Hello, wörld {generate.params.seed}! 👋", size=2)
    events = stream(gateway, path, body)
    whole = gateway.post(path, body).json()
    assert fold_stream(events) == fold_response(whole)
    assert all(choice["finish"] for choice in fold_stream(events).values())


@pytest.mark.parametrize("case", CASES)
def test_a_stream_has_the_same_bytes_written_by_us_or_by_the_server(
    case: str, engine: ScriptedEngine, gateway: GatewayProcess, pywsgi: GatewayProcess
) -> None:
    """The gateway writes only the first stream to the socket itself. It does not take over the
    sockets of HTTP/1.0 clients, and pywsgi does not expose its sockets."""
    path, body = CASES[case]
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    engine.step_s = 0.01  # all requests of one body arrive between two steps
    bodies = []
    for port, version in ((gateway.port, "1.1"), (gateway.port, "1.0"), (pywsgi.port, "1.1")):
        status, headers, data = exchange(
            port, path, body, version=version, headers={"X-Request-Id": "same"}
        )
        assert status == 200
        assert headers["x-accel-buffering"] == "no"
        data = data.replace(KEEP_ALIVE, b"")  # where the machine was busy with others
        bodies.append(re.sub(rb'"created":\d+', b'"created":0', data))
    engine.step_s = 0.0005
    by_choice = [sorted(data.split(b"\n\n")) for data in bodies]
    assert by_choice[0] == by_choice[1] == by_choice[2]
    if "n" not in body and not isinstance(body.get("prompt"), list):
        assert bodies[0] == bodies[1] == bodies[2]


def test_the_log_shows_how_streams_are_written(
    gateway: GatewayProcess, pywsgi: GatewayProcess
) -> None:
    # One for each time that it serves a model, which is twice if it lost its engine meanwhile.
    assert gateway.log.count("streams: ") == gateway.log.count(" INFO serving ") >= 1
    assert "streams: written directly to the client's socket" in gateway.log
    why = "the server was not started with gateway/gunicorn_conf.py"
    assert f"streams: written through WSGI, because {why}" in pywsgi.log


def test_a_chat_has_the_members_that_its_clients_read(gateway: GatewayProcess) -> None:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="-", max_retries=0) as client:
        whole = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "hi"}]
        )
    assert whole.service_tier == "default"
    message = whole.choices[0].message.model_dump()
    assert (message["annotations"], message["refusal"]) == ([], None)
    for unasked in ("prompt_logprobs", "prompt_token_ids"):
        assert whole.model_extra is not None
        assert whole.model_extra[unasked] is None
    msgspec.json.decode(gateway.post(CHAT, {"messages": HI}).content, type=ChatCompletion)
    for event in stream(gateway, CHAT, {"messages": HI}):
        msgspec.convert(event, ChatChunk)


def test_an_echoed_prompt_has_its_own_logprobs_and_those_asked_for_beside(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    body: dict[str, Any] = {"prompt": "Say:", "echo": True, "max_tokens": 2}

    def result(**fields: Any) -> Any:
        return gateway.post(COMPLETIONS, {**body, **fields}).json()["choices"][0]

    both = result(logprobs=1, prompt_logprobs=3)
    assert engine.generates[-1].params.prompt_logprobs == 3
    assert both["prompt_logprobs"][0] is None
    assert [len(chances) for chances in both["prompt_logprobs"][1:]] == [3, 3, 3]
    assert both["text"].startswith("Say:")
    assert both["logprobs"] == result(logprobs=1)["logprobs"]
    assert result(prompt_logprobs=3) == {**both, "logprobs": None}
    assert result(logprobs=3, prompt_logprobs=0)["logprobs"] == result(logprobs=3)["logprobs"]


def test_streams_follow_each_other_on_one_connection(gateway: GatewayProcess) -> None:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="-", max_retries=0) as client:
        for _ in range(3):
            chunks = list(client.completions.create(model="scripted", prompt="x", stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world!"
            whole = client.completions.create(model="scripted", prompt="x")
            assert whole.choices[0].text == "Hello, world!"


def test_the_official_client_streams_a_chat(gateway: GatewayProcess) -> None:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="-", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        said, usage, finish = "", None, None
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                said += choice.delta.content or ""
                finish = choice.finish_reason or finish
    assert (said, finish) == ("Hello, world!", "stop")
    assert usage is not None
    assert usage.total_tokens == 21 + 14


def test_a_stop_string_ends_the_text_and_aborts_at_the_engine(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    for size in (1, 2, 3, 50):
        engine.step_s = 0.02 * size  # the answer takes 8 s, so it does not end before its abort
        engine.script = lambda generate, size=size: text_reply(  # type: ignore[misc]
            "one two END three" * 50, size=size
        )
        body = {"messages": HI, "stop": ["END"], "max_tokens": 400}
        choice = fold_stream(stream(gateway, CHAT, body))[0]
        assert choice["text"] == "one two "
        assert choice["finish"] == ("stop", "END")
        request = engine.generates[-1].request
        engine.await_abort(request)
        assert engine.abort_reasons[request] == "complete"


def test_a_refused_choice_is_the_reason_why_the_others_are_aborted(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    def script(generate: Generate) -> Reply:
        return Overloaded("full").info() if len(engine.generates) == 2 else text_reply("a" * 100)

    engine.script = script
    engine.is_paused = True  # the first choice is open when the second is refused
    assert gateway.post(CHAT, {"messages": HI, "n": 2}).status_code == 429
    first = engine.generates[0].request
    engine.await_abort(first)
    assert engine.abort_reasons == {first: "error"}


def test_answers_of_one_request_interleave_and_are_never_mixed_up(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    texts = {7: "alpha alpha alpha", 8: "beta beta beta", 9: "gamma"}
    engine.script = lambda generate: text_reply(texts[generate.params.seed or 0])
    engine.is_paused = True  # until all three have arrived
    body = {"messages": HI, "n": 3, "seed": 7}
    events = stream(gateway, CHAT, body, on_head=engine.resume)
    choices = fold_stream(events)
    assert [choices[index]["text"] for index in range(3)] == list(texts.values())
    heads = [event["choices"][0] for event in events[:3]]
    assert [(head["index"], head["delta"].get("role")) for head in heads] == [
        (0, "assistant"),
        (1, "assistant"),
        (2, "assistant"),
    ]
    order = [event["choices"][0]["index"] for event in events[3:]]
    assert order[:6] == [0, 1, 2, 0, 1, 2]


def test_a_silent_stream_is_kept_alive_with_comments(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: TokenReply([[], *([i] for i in ids_of("ok"))])
    engine.step_s = 0.5
    body = {"messages": HI, "stream": True}
    for version in ("1.1", "1.0"):
        _, _, data = exchange(gateway.port, CHAT, body, version=version)
        assert b": keep-alive\n\n" in data
        assert fold_stream(events_of(data))[0]["text"] == "ok"
    engine.step_s = 0.0005


def test_every_parameter_reaches_the_engine(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    body = {
        "messages": HI,
        "max_tokens": 9,
        "max_completion_tokens": 8,
        "min_tokens": 2,
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 11,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"5": -100, "6": 1.5},
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 3,
        "cache_salt": "pepper",
        "priority": -4,
        "user": "somebody",
    }
    assert gateway.post(CHAT, body).status_code == 200
    (generate,) = engine.generates
    assert generate.namespace == "pepper"
    assert generate.priority == -4
    params = generate.params
    assert text_of(generate.prompt.tolist()) == "<user>hi\n<assistant>"
    assert (params.max_tokens, params.min_tokens, params.temperature) == (8, 2, 0.25)
    assert (params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 7, 0.125, 11)
    assert (params.frequency_penalty, params.presence_penalty) == (0.5, -0.5)
    assert (params.repetition_penalty, params.logit_bias) == (1.25, {5: -100.0, 6: 1.5})
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs) == ([3, 4], True, 3)


def test_defaults_come_from_the_model_and_then_from_the_api(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    gateway.post(CHAT, {"messages": HI, "top_p": None})
    gateway.post(COMPLETIONS, {"prompt": "x", "temperature": 0})
    chat, text = (generate.params for generate in engine.generates)
    assert (chat.temperature, chat.top_k, chat.top_p, chat.max_tokens) == (0.7, 40, 1.0, None)
    assert (text.temperature, text.top_k, text.max_tokens) == (0, 40, 16)


def test_the_template_options_of_a_request_are_applied(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    begun = [*HI, {"role": "assistant", "content": "I beg"}]
    gateway.post(CHAT, {"messages": begun, "continue_final_message": True})
    gateway.post(CHAT, {"messages": HI, "add_generation_prompt": False})
    prompts = [text_of(generate.prompt.tolist()) for generate in engine.generates]
    assert prompts == ["<user>hi\n<assistant>I beg", "<user>hi\n"]


def test_fields_without_effect_are_named_in_the_response(gateway: GatewayProcess) -> None:
    response = gateway.post(CHAT, {"messages": HI, "max_completion_token": 5, "metadata": {}})
    assert response.headers["x-ignored-fields"] == "max_completion_token, metadata"


def test_the_tokenizer_describes_itself_as_lm_eval_reads_it(gateway: GatewayProcess) -> None:
    """lm-eval's remote tokenizer takes special tokens and the template from here, and their ids
    from /tokenize."""
    info = json_of(requests.get(gateway.url + "/tokenizer_info", timeout=20))
    card = scripted_card()
    assert info == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": card.chat_template,
    }
    for name, token_id in (("bos_token", card.bos_token_id), ("eos_token", card.eos_token_ids[0])):
        body = {"prompt": info[name], "add_special_tokens": False}
        assert json_of(gateway.post("/tokenize", body))["tokens"] == [token_id]
    unknown = requests.get(gateway.url + "/tokenizer_info?model=x", timeout=20)
    assert unknown.status_code == 404


def test_a_text_is_tokenized_and_back(gateway: GatewayProcess) -> None:
    answer = gateway.post("/tokenize", {"prompt": "né", "return_token_strs": True}).json()
    assert answer["count"] == 3
    assert answer["tokens"] == list("né".encode())
    assert answer["max_model_len"] == 512
    assert answer["token_strs"] == ["n", "Ã", "©"]  # as the vocabulary spells bytes
    assert gateway.post("/tokenize", {"prompt": "né"}).json()["token_strs"] is None
    back = gateway.post("/detokenize", {"model": "scripted", "tokens": answer["tokens"]}).json()
    assert back == {"prompt": "né", "content": "né"}  # the names of vLLM and of llama.cpp
