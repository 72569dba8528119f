"""Nothing that a client sends is missing from the prompt, or the request is refused.

Published chat templates are rendered with conversations of all shapes that clients send, from every
API: each text, call, result and tool is in the prompt, once it has a name that is found nowhere
else, and no list of parts is written as Python or JSON.

A template may omit the reasoning of earlier turns: models are trained so. The reasoning of an open
loop of tool calls must be there, unless the template renders none (`TemplateTraits.reasoning`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import pytest

from gateway.prompt.render import ChatRenderer
from gateway.prompt.traits import TemplateTraits
from gateway.served_model import ModelOptions, ServedModel
from gateway.text.tokenizer import Tokenizer
from protocol.config.gateway import ModelConfig
from protocol.engine.messages import Limits
from protocol.wire.errors import InvalidRequest
from tests.support import published_templates as published
from tests.support.api_prompts import BODIES, prompt_of, text_of
from tests.support.examples import examples

CLIENTS = published.FOLDER.parent / "clients"
LISTS = ("'type': 'text'", '"type": "text"', "'text':", '"text":', "[{", "<generator")
"""Signs of a list of parts that was written as a whole."""
RANDOM = re.compile(r"[A-Za-z0-9]{6,}")
"""Pattern of the random part of a call's id."""
LIMITS = Limits(
    max_len=1 << 17,
    max_slots=8,
    block_tokens=16,
    num_blocks=1 << 14,
    token_budget=256,
    prefix_cache=True,
)
NOT_FOR_CHATS = {
    "hfjs__fireworks-ai-firefunction-v1": "has a role `functions` in place of tools",
    "llamacpp__fireworks-ai-llama-3-firefunction-v2": "reads the variable `functions`",
    "vllm__bge-reranker-v2-gemma": "reads the roles of a reranker",
    "vllm__mxbai_rerank_v2": "reads the roles of a reranker",
    "vllm__nemotron-rerank": "reads the roles of a reranker",
    "vllm__nemotron-vl-rerank": "reads the roles of a reranker",
    "vllm__nemotron_embed_vl": "renders one message",
    "vllm__qwen3_reranker": "reads the roles of a reranker",
    "vllm__qwen3_vl_reranker": "reads the roles of a reranker",
    "vllm__template_kimi_audio": "reads the variable `conversations`",
    "vllm__vlm2vec_phi3v": "renders one message",
    "vllm__vlm2vec_qwen2vl": "renders one message",
    "vllm__zerank2": "reads the roles of a reranker",
}
"""Templates that cannot render a conversation -> why. They refuse some or all of the shapes."""

LOSSY = {
    "the last message": "{{ messages[-1].content }}",
    "the first message": "{{ messages[0].content }}",
    "two messages": "{% for m in messages[-2:] %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "the first and the last": "{{ messages[0].content }}|{{ messages[-1].content }}",
    "users": "{% for m in messages if m.role == 'user' %}<user>{{ m.content }}{% endfor %}",
    "four messages": "{% for m in messages[-4:] %}<{{ m.role }}>{{ m.content }}{% endfor %}",
}
"""Template sources that omit texts, by what they render."""

Message = dict[str, Any]


# ---- shapes of conversations. Each text of a shape is unique


class _Words:
    """Makes texts that occur once. None is part of another one."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        #: The texts that must be in the prompt.
        self.all: list[str] = []
        #: The texts of reasoning in an open loop of tool calls.
        self.reasoning: list[str] = []

    def new(self) -> str:
        word = f"zq{next(self._numbers)}x"
        self.all.append(word)
        return word


class ConversationShape:
    """A conversation with tools, and the texts that its prompt must contain."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], *, has_tools: bool) -> None:
        words = _Words()
        self.tools = [_tool(words.new()), _tool(words.new())] if has_tools else None
        last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        self.messages = [
            _worded(message, words, is_open=place > last_user)
            for place, message in enumerate(messages)
        ]
        self.words, self.reasoning = words.all, words.reasoning


def _tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"size": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def _worded(message: Mapping[str, Any], words: _Words, *, is_open: bool) -> Message:
    """Return the message with a new text in place of each of its texts."""
    content = message.get("content")
    if isinstance(content, str):
        content = words.new() if content else content
    elif content is not None:
        content = [{"type": "text", "text": words.new()} for _ in content]
    worded: Message = {"role": message["role"], "content": content}
    if message.get("reasoning") or message.get("reasoning_content"):
        worded["reasoning_content"] = words.new()
        words.all.pop()
        if is_open and message.get("tool_calls"):
            words.reasoning.append(worded["reasoning_content"])
    if message.get("tool_calls"):
        worded["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": words.new(),
                    "arguments": json.dumps({"size": words.new()}),
                },
            }
            for call in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        worded["tool_call_id"] = message["tool_call_id"]
    return worded


def _called(*ids: str, content: Any = None, **members: Any) -> Message:
    calls = [{"id": f"call_{call_id}aBcDeFgHiJkLmNo"} for call_id in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls, **members}


def _result(call_id: str, content: Any = "x") -> Message:
    return {"role": "tool", "tool_call_id": f"call_{call_id}aBcDeFgHiJkLmNo", "content": content}


def _said(role: str, num_parts: int | None = None) -> Message:
    return {"role": role, "content": "x" if num_parts is None else [{}] * num_parts}


SYSTEM, USER, ANSWER = _said("system"), _said("user"), _said("assistant")
OWN: Sequence[Sequence[Message]] = (
    [SYSTEM, USER],
    [SYSTEM, SYSTEM, USER],
    [_said("developer", 1), _said("developer", 2), _said("user", 1), _said("user", 1)],
    [_said("system", 2), _said("user", 2), _said("assistant", 2), _said("user", 2)],
    [SYSTEM, _said("user", 2), SYSTEM],
    [SYSTEM, _said("user", 2), SYSTEM, _called("a"), _result("a")],
    [SYSTEM, _said("user", 2), SYSTEM, _called("a"), _result("a"), ANSWER, USER, SYSTEM],
    [SYSTEM, USER, ANSWER, SYSTEM, USER],
    [SYSTEM, USER, _called("a"), _result("a", [{}, {}])],
    [SYSTEM, USER, _called("a", content=[{}, {}]), _result("a", [{}, {}]), ANSWER, USER],
    [USER, _called("a", "b"), _result("a"), _result("b")],
    [USER, _called("a", "b"), _result("b"), _result("a"), ANSWER, USER],
    [USER, _called("a", "b", content="x"), _result("a"), _result("b"), ANSWER, USER],
    [USER, _called("a"), _result("a"), USER],
    [USER, _called("a", "b"), _result("a"), _result("b"), USER, SYSTEM],
    [USER, _called("a", reasoning="x"), _result("a")],
    [USER, _called("a", content="x", reasoning="x"), _result("a")],
    [SYSTEM, USER, _called("a"), _result("a"), _called("b", content="x"), _result("b")],
    [USER, _called("a", reasoning="x"), _result("a"), _called("b", reasoning="x"), _result("b")],
    [USER, ANSWER, ANSWER, USER],
    [USER, {**ANSWER, "reasoning": "x"}, USER],
    [USER, {**ANSWER, "tool_calls": []}, USER],
    [SYSTEM, USER, _called("a"), SYSTEM, _result("a"), ANSWER, USER],
    [SYSTEM, USER, _called("a", "b"), SYSTEM, _result("a"), _result("b"), ANSWER, USER],
    [USER, _called("a", "b"), _result("b"), SYSTEM, _result("a"), SYSTEM],
)
"""Shapes of conversations, whose texts are replaced."""


def _recorded() -> Iterator[tuple[list[Mapping[str, Any]], bool]]:
    """Yield the conversations that clients sent, as chat messages, and whether they had tools.
    Images are left out."""
    for file in sorted(CLIENTS.glob("*.json")):
        body = json.loads(file.read_text()).get("body")
        if not isinstance(body, dict):
            continue
        if isinstance(body.get("messages"), list):
            messages = _chat_messages(body)
        elif isinstance(body.get("input"), list):
            messages = _item_messages(body["input"])
        else:
            continue
        if messages is not None and any(message["role"] == "user" for message in messages):
            yield messages, bool(body.get("tools"))


def _texts(content: Any) -> Any:
    """Return a content with an empty part for each of its texts."""
    if isinstance(content, str | None):
        return content
    return [{} for part in content if "text" in part.get("type", "text")]


def _chat_messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return the messages of a chat, of Ollama's API or of the Messages API."""
    found: list[Mapping[str, Any]] = []
    if body.get("system"):
        found.append({"role": "system", "content": _texts(body["system"])})
    ids = itertools.count()
    for message in body["messages"]:
        content = message.get("content")
        blocks = content if isinstance(content, list) else []
        results = [block for block in blocks if block.get("type") == "tool_result"]
        uses = [block for block in blocks if block.get("type") == "tool_use"]
        calls = message.get("tool_calls") or uses
        for result in results:
            own = {"tool_call_id": result["tool_use_id"], "content": _texts(result["content"])}
            found.append({"role": "tool", **own})
        thinking = [block for block in blocks if block.get("type") == "thinking"]
        if results and len(results) == len(blocks):
            continue
        found.append(
            {
                "role": message["role"],
                "content": _texts([block for block in blocks if block not in results + thinking])
                if blocks
                else content,
                "reasoning": bool(thinking or message.get("thinking") or message.get("reasoning")),
                "tool_calls": [{"id": call.get("id") or f"id{next(ids)}"} for call in calls],
                "tool_call_id": message.get("tool_call_id"),
            }
        )
    return found if _is_complete(found) else None


def _item_messages(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """Return the items of the Responses API as chat messages."""
    found: list[Mapping[str, Any]] = []
    for item in items:
        match item.get("type", "message"):
            case "message":
                found.append({"role": item["role"], "content": _texts(item["content"])})
            case "function_call":
                call = {"id": item["call_id"]}
                if found and found[-1].get("tool_calls"):
                    found[-1]["tool_calls"].append(call)
                else:
                    found.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "function_call_output":
                own = {"tool_call_id": item["call_id"], "content": _texts(item["output"])}
                found.append({"role": "tool", **own})
            case "reasoning":
                pass  # shapes with reasoning come from the other APIs
            case _:
                return None
    return found if _is_complete(found) else None


def _is_complete(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each result names a call, and each call has a result."""
    calls = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    results = [m["tool_call_id"] for m in messages if m.get("role") == "tool"]
    return sorted(calls, key=str) == sorted(results, key=str)


@cache
def shapes() -> Sequence[ConversationShape]:
    """Return a conversation of each shape."""
    given = [(messages, has_tools) for messages in OWN for has_tools in (True, False)]
    found: dict[str, ConversationShape] = {}
    for messages, has_tools in [*given, *_recorded()]:
        shape = ConversationShape(messages, has_tools=has_tools)
        found.setdefault(_with_numbered_ids(shape), shape)
    return list(found.values())


def _with_numbered_ids(shape: ConversationShape) -> str:
    """Return the shape as text, with a number in place of what is random in each id of a call. It
    is the same for conversations that differ only in that."""
    text = json.dumps([shape.messages, shape.tools])
    ids = [call["id"] for message in shape.messages for call in message.get("tool_calls") or ()]
    for number, own_id in enumerate(dict.fromkeys(ids)):
        text = text.replace(json.dumps(own_id), f'"{RANDOM.sub("", own_id)}{number}"')
    return text


# ---- prompts


class OneToken(Tokenizer):
    """Encodes each prompt as one token. This law is about the text of prompts, and the tokenizer
    takes longer than the template."""

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return [0] if text else []


@lru_cache(maxsize=1)
def model(name: str) -> ServedModel:
    config = ModelConfig(default_chat_template_kwargs='{"enable_thinking": true, "thinking": true}')
    options = ModelOptions.from_config(config, published.TEMPLATES)
    text = published.model_text(name)
    renderer = ChatRenderer(text.card, OneToken(text.card), published.TEMPLATES)
    return ServedModel.from_text(replace(text, renderer=renderer), text.card, LIMITS, options)


def _traits(name: str, shape: ConversationShape) -> TemplateTraits:
    return model(name).renderer.template_for(shape.tools).traits


def requests_of(name: str) -> Iterator[tuple[str, ConversationShape]]:
    """Yield (API, shape) pairs: with few examples, each shape for one API, which is another one for
    each template."""
    apis = list(BODIES)
    start = published.NAMES.index(name)
    for place, shape in enumerate(shapes()):
        one = [apis[(start + place) % len(apis)]]
        yield from ((api, shape) for api in examples(one, apis))


def problems(name: str) -> Iterator[str]:
    """Yield what is lost from the shapes' prompts, and which of them are refused."""
    for api, shape in requests_of(name):
        told = f"{api}: {[message['role'] for message in shape.messages]}"
        try:
            prompt = prompt_of(api, BODIES[api](shape.messages, shape.tools), model(name))
        except InvalidRequest as error:
            yield f"{told} is refused: {error}"
            continue
        words = list(shape.words)
        if _traits(name, shape).reasoning != "omitted":
            words += shape.reasoning
        lost = [word for word in words if word not in prompt]
        if lost:
            yield f"{told} loses {lost} of {shape.messages}: {prompt}"
        contents = [text_of(m["content"]) for m in shape.messages if m["content"]]
        near = [prompt[max(0, prompt.find(text) - 40) : prompt.find(text)] for text in contents]
        if any(sign in text for text in near for sign in LISTS[:4]):
            yield f"{told} has a list of parts: {prompt}"


@published.NEEDS_TEMPLATES
@pytest.mark.parametrize("name", published.NAMES)
def test_all_that_a_client_sends_is_in_the_prompt(name: str) -> None:
    found = list(problems(name))
    if name in NOT_FOR_CHATS:
        assert found, "remove it from NOT_FOR_CHATS"
        assert all("is refused" in problem for problem in found)
    else:
        assert not found, f"{len(found)} of {len(list(requests_of(name)))}: {found[0]}"


@pytest.mark.parametrize("what", LOSSY)
def test_a_request_is_refused_if_the_template_omits_a_part_of_it(what: str) -> None:
    card = published.card_of_template(LOSSY[what])
    options = ModelOptions.from_config(ModelConfig(), published.TEMPLATES)
    served = ServedModel.from_card(card, LIMITS, options, published.TEMPLATES)
    own = [ConversationShape(shape, has_tools=tools) for shape in OWN for tools in (False, True)]
    refused = []
    for api, shape in itertools.product(BODIES, [ConversationShape([USER], has_tools=False), *own]):
        try:
            prompt = prompt_of(api, BODIES[api](shape.messages, shape.tools), served)
        except InvalidRequest as error:
            refused.append(error.param)
            continue
        assert [word for word in shape.words if word not in prompt] == [], (api, prompt)
    assert 0 < len(refused) < len(BODIES) * (len(own) + 1)
    assert all(re.match(r"messages\[|input\[|system|tools|instructions", str(p)) for p in refused)
