"""Shared parts of tests that chat over HTTP with a model that thinks and calls tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from engine_core.grammar.compiler import Compiler
from protocol.engine.grammar import check_grammar
from protocol.engine.messages import Generate
from protocol.wire.errors import InvalidRequest
from tests.support.gateway_process import GatewayProcess
from tests.support.grammars import possible
from tests.support.http import events_of, exchange, fold_chat_response, fold_chat_stream, json_of
from tests.support.scripted_engine import (
    EOS,
    MARKERS,
    Reply,
    Script,
    ScriptedEngine,
    TokenReply,
    marked_ids,
    text_reply,
    thinking_card,
)

CHAT = "/v1/chat/completions"

HI = [{"role": "user", "content": "hi"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", city={"type": "string"}), tool("now")]

WITH_TOOLS = {"messages": HI, "tools": TOOLS}


def call(name: str, arguments: Any) -> str:
    """Return a tool call in the model's format."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


COLOGNE = call("weather", {"city": "Köln"})


def streamed(gateway: GatewayProcess, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return fold_chat_stream(stream(gateway, body))


def stream(gateway: GatewayProcess, body: dict[str, Any]) -> list[Any]:
    status, _, data = exchange(gateway.port, CHAT, {**body, "stream": True})
    assert status == 200, data
    return events_of(data)


def whole(gateway: GatewayProcess, body: dict[str, Any]) -> Any:
    return json_of(gateway.post(CHAT, body))


def without_ids(choices: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the choices without the ids of calls, which are random."""
    return {
        index: {**choice, "calls": [call[1:] for call in choice["calls"]]}
        for index, choice in choices.items()
    }


def both(gateway: GatewayProcess, body: dict[str, Any]) -> dict[str, Any]:
    """Return the first choice of the answer to `body`, without the ids of calls. Checks that a
    stream and a whole answer are the same."""
    chunked, at_once = streamed(gateway, body), fold_chat_response(whole(gateway, body))
    assert without_ids(chunked) == without_ids(at_once)
    return without_ids(chunked)[0]


def answers(engine: ScriptedEngine, text: str, **options: Any) -> None:
    engine.script = lambda generate: text_reply(text, marked=True, **options)


OFF: dict[str, dict[str, Any]] = {
    "enable_thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    "thinking": {"chat_template_kwargs": {"thinking": False}},
    "thinking_mode": {"chat_template_kwargs": {"thinking_mode": "disabled"}},
    "reasoning_effort": {"reasoning_effort": "none"},
    "reasoning.effort": {"reasoning": {"effort": "none"}},
    "reasoning.enabled": {"reasoning": {"enabled": False}},
    "thinking.type": {"thinking": {"type": "disabled"}},
    "top-level enable_thinking": {"enable_thinking": False},
}

ON: dict[str, dict[str, Any]] = {
    "enable_thinking": {"chat_template_kwargs": {"enable_thinking": True}},
    "thinking": {"chat_template_kwargs": {"thinking": True}},
    "thinking_mode": {"chat_template_kwargs": {"thinking_mode": "enabled"}},
    "reasoning_effort": {"reasoning_effort": "high"},
    "reasoning.effort": {"reasoning": {"effort": "low"}},
    "reasoning.enabled": {"reasoning": {"enabled": True}},
    "thinking.type": {"thinking": {"type": "enabled"}},
    "top-level enable_thinking": {"enable_thinking": True},
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def structured(**members: Any) -> dict[str, Any]:
    return {"messages": HI, "structured_outputs": members}


def json_schema(schema: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return {"messages": HI, "response_format": wanted}


class Compiling:
    """A script that refuses the grammars that a real engine refuses. It replies to all other
    requests with `text`."""

    def __init__(self, text: str = "{}") -> None:
        self.text = text
        self._compiler = Compiler(thinking_card())

    def __call__(self, generate: Generate) -> Reply:
        try:
            if generate.grammar is not None:
                check_grammar(generate.grammar)
                self._compiler.compile(generate.grammar)
        except InvalidRequest as error:
            return error.info()
        return text_reply(self.text, marked=True)


class Tasteful:
    """A script of a model that prefers some tokens. The engine's own masks constrain it.

    taste   returns the preferred next tokens, best first, given the tokens so far. If the grammar
            allows none of them, the model takes the lowest token that the grammar allows
    most    number of tokens after which the answer is cut off
    """

    def __init__(self, taste: Callable[[list[int]], Iterable[int]], most: int = 2000) -> None:
        self._taste = taste
        self._most = most
        self._compiler = Compiler(thinking_card())

    def __call__(self, generate: Generate) -> Reply:
        assert generate.grammar is not None
        check_grammar(generate.grammar)
        matcher = self._compiler.compile(generate.grammar).start()
        said: list[int] = []
        while len(said) < self._most and not matcher.is_complete:
            likes = list(self._taste(said))
            if matcher.constrains:
                may = possible(matcher, self._compiler.vocab_size)
                token = next((token for token in likes if token in may), min(may))
            else:
                token = likes[0]
            if token == EOS:
                return TokenReply([said])
            matcher.consume(token)
            assert matcher.error is None
            said.append(token)
        if matcher.is_complete:
            return TokenReply([said])
        return TokenReply([said], finish="length", stop_token=None)


def held_to(*texts: str) -> Script:
    """Return a script that replies with the first of `texts` that the grammar allows. If the
    grammar allows none, the reply ends as soon as possible. Without a grammar, the reply is the
    first text."""

    def taste(said: list[int]) -> Iterable[int]:
        for text in texts:
            ids = marked_ids(text)
            if ids[: len(said)] == said:
                yield ids[len(said)] if len(said) < len(ids) else EOS
        yield from (MARKERS["</think>"], EOS, MARKERS["<tool_call>"])
        yield from b'"}]' if said.count(ord('"')) % 2 else b'}]"'

    held = Tasteful(taste)
    return lambda generate: (
        held(generate) if generate.grammar else text_reply(texts[0], marked=True)
    )


TRUTH: list[tuple[str, str, bool, str]] = [
    # tool_choice, calls completed, cut short, finish_reason
    ("auto", "none", False, "stop"),
    ("auto", "none", True, "length"),
    ("auto", "one", False, "tool_calls"),
    ("auto", "one", True, "length"),
    ("required", "none", False, "stop"),
    ("required", "none", True, "length"),
    ("required", "one", False, "tool_calls"),
    ("required", "one", True, "length"),
    ("named", "none", False, "stop"),
    ("named", "none", True, "length"),
    ("named", "one", False, "tool_calls"),
    ("named", "one", True, "length"),
    ("none", "none", False, "stop"),
    ("none", "none", True, "length"),
    ("none", "one", False, "stop"),
    ("none", "one", True, "length"),
]
"""The table of finish reasons in docs/use/formats.md, which holds for streams and for whole
answers."""
