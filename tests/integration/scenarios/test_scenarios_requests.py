"""Scenarios of further request fields."""

from __future__ import annotations

from protocol.engine.messages import Generate
from tests.support.gateway_process import GatewayProcess
from tests.support.http import fold_chat_response, json_of
from tests.support.scenarios import (
    CHAT,
    HI,
    OFF,
    ON,
    TOOLS,
    WITH_TOOLS,
    answers,
    call,
    stream,
    user,
    whole,
)
from tests.support.scripted_engine import (
    EOS,
    ScriptedEngine,
    TokenReply,
    prompt_of,
    text_of,
    text_reply,
)


def test_65_an_unknown_field_is_listed_or_refused(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "ok")
    body = {"messages": HI, "max_tokenz": 5}
    assert whole(gateway, body)["ignored_params"] == ["max_tokenz"]
    events = stream(gateway, body)
    assert [event.get("ignored_params") for event in events[:2]] == [["max_tokenz"], None]
    response = gateway.post(CHAT, {**body, "strict_params": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokenz")
    response = gateway.post(CHAT, {"messages": HI, "reasoning_effort": "banana"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "reasoning_effort")
    assert '"none", "minimal", "low", "medium", "high"' in error["message"]


def test_words_and_tokens_reach_the_engine(engine: ScriptedEngine, gateway: GatewayProcess) -> None:
    answers(engine, "ok")
    body = {
        "messages": HI,
        "bad_words": ["no"],
        "allowed_token_ids": [65, EOS],
        "logprobs": True,
        "logprob_token_ids": [66],
        "prompt_logprobs": 1,
    }
    answer = whole(gateway, body)
    params = engine.generates[0].params
    assert params.bad_words == [list(b"no"), list(b" no")]
    assert (params.allowed_token_ids, params.logprob_token_ids) == ([65, EOS], [66])
    prompt = engine.generates[0].prompt.tolist()
    assert len(answer["prompt_logprobs"]) == len(prompt)
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1][str(prompt[1])]["rank"] == 1


def test_a_batch_is_many_conversations_each_read_in_its_own_way(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    def echo(generate: Generate) -> TokenReply:
        prompt = text_of(generate.prompt.tolist())
        name = prompt.rpartition("<user>")[2][0]
        return text_reply(f"{name}</think>{name}{call('now', {})}", marked=True)

    engine.script = echo
    begun = {"role": "assistant", "content": "<think>so "}
    conversations = [[user("a")], [user("b"), begun], [user("c")]]
    body = {"messages": conversations, "tools": TOOLS, "n": 2, "continue_final_message": True}
    choices = json_of(gateway.post(CHAT + "/batch", body))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4, 5]
    assert [choice["conversation"] for choice in choices] == [0, 0, 1, 1, 2, 2]
    messages = [choice["message"] for choice in choices]
    assert [message["reasoning"] for message in messages] == [None, None, "b", "b", None, None]
    assert messages[2]["content"] == "b"
    assert {message["tool_calls"][0]["function"]["name"] for message in messages} == {"now"}
    ids = [message["tool_calls"][0]["id"] for message in messages]
    assert len(set(ids)) == 6


def test_a_batch_reports_kwargs_and_errors_by_conversation(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "ok")
    body = {"messages": [HI, HI], "return_effective_kwargs": True, "reasoning_effort": "none"}
    answer = gateway.post(CHAT + "/batch", body).json()
    assert answer["effective"] == [{"chat_template_kwargs": {"enable_thinking": False}}] * 2
    for fields, param in (
        ({"messages": [HI, [{"role": "king", "content": ""}]]}, "messages[1][0].role"),
        ({"messages": [HI], "stream": True}, "stream"),
        ({"messages": [HI] * 1025}, "messages"),
    ):
        response = gateway.post(CHAT + "/batch", fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_tokenize_renders_like_chat(engine: ScriptedEngine, gateway: GatewayProcess) -> None:
    answers(engine, "ok")
    for said in ({}, ON["reasoning_effort"], OFF["thinking"], {"tool_choice": "none"}):
        body = {**WITH_TOOLS, **said}
        tokens = gateway.post("/tokenize", body).json()["tokens"]
        whole(gateway, body)
        assert engine.generates[-1].prompt.tolist() == tokens


def test_a_requests_own_template_is_refused_unless_the_operator_trusts_it(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    answers(engine, "ok")
    body = {"messages": HI, "chat_template": "{{ messages[0].content }}!"}
    response = gateway.post(CHAT, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
    with GatewayProcess(engine=engine.address, trust_request_chat_template=True) as trusting:
        trusting.await_ready()
        assert fold_chat_response(whole(trusting, body))[0]["content"] == "ok"
        assert prompt_of(engine) == "hi!"
        response = trusting.post(CHAT, {"messages": HI, "chat_template": "{% if %}"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
