"""A server of a tiny Qwen3 with random weights, and with the published tokenizer and chat template.

These tests cover a family other than the default model's from end to end: prompts, greedy answers,
formats that are found in the template, and calls that a grammar forces.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from openai import OpenAI

from tests.support.eager import expected
from tests.support.server import SERVED_NAME, Server
from tests.support.tokenizers import REAL_TOKENIZERS

QWEN3 = REAL_TOKENIZERS / "qwen3"
pytestmark = pytest.mark.skipif(
    not QWEN3.exists(), reason="the published tokenizer of Qwen3 is not beside this checkout"
)
VOCAB, EOS, THINK = 151936, 151645, 151667
TIE = 1e-4
TOOL = {
    "type": "function",
    "function": {
        "name": "alarm",
        "description": "Weckt um <hour> & 'weekly'",
        "parameters": {
            "type": "object",
            "properties": {
                "hour": {"type": "integer", "minimum": 0, "maximum": 23},
                "note": {"type": "string", "maxLength": 6},
            },
            "required": ["hour", "note"],
            "additionalProperties": False,
        },
    },
}
CALL = {"name": "alarm", "arguments": {"hour": 7, "note": "früh"}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Wake me, s'il vous plaît 語 👩🏽‍🚀\n\n\t12345 <think>"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": '{"done": true}'},
    {"role": "user", "content": "Thanks. And <|im_end|> tomorrow?"},
]


@pytest.fixture(scope="module")
def theirs() -> transformers.Qwen3ForCausalLM:
    """Return a model of transformers with the published vocabulary and tiny other dimensions."""
    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.15,
        tie_word_embeddings=True,
        eos_token_id=EOS,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def directory(
    theirs: transformers.Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    theirs.save_pretrained(folder)
    for file in QWEN3.iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    options = ("--served-name", SERVED_NAME, "--dtype", "float32", "--drain-s", "2")
    with Server(*options, "--threads", "1", model=str(directory)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


def test_the_formats_are_found_in_the_template(client: OpenAI) -> None:
    (model,) = client.models.list().data
    formats: dict[str, Any] = (model.model_extra or {})["formats"]
    assert (formats["tools"], formats["reasoning"]) == ("hermes", "qwen3")


@pytest.mark.parametrize("num_turns", [2, 4, 5])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}], ids=str)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
def test_the_ids_of_a_prompt_and_its_greedy_answer_are_those_of_transformers(
    client: OpenAI,
    tokenizer: Any,
    theirs: transformers.Qwen3ForCausalLM,
    num_turns: int,
    kwargs: dict[str, Any],
    tools: list[Any],
) -> None:
    turns = TURNS[:num_turns]
    extra = {"return_token_ids": True, "ignore_eos": True, "chat_template_kwargs": kwargs}
    sent: list[Any] = [
        turn | {"tool_calls": [sent_call(call) for call in turn["tool_calls"]]}
        if "tool_calls" in turn
        else turn
        for turn in turns
    ]
    answer: Any = client.chat.completions.create(
        model=SERVED_NAME,
        messages=sent,
        temperature=0,
        max_tokens=8,
        extra_body=extra | ({"tools": tools} if tools else {}),
    )
    prompt = tokenizer.apply_chat_template(
        turns, tools=tools or None, add_generation_prompt=True, return_dict=False, **kwargs
    )
    assert answer.prompt_token_ids == prompt
    ids: list[int] = answer.choices[0].token_ids
    logits = expected(theirs, prompt + ids)[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert len(ids) == 8
    assert (logits.amax(1) - chosen).max() <= TIE * max(1.0, float(logits.abs().max()))


def sent_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call as clients send it: its arguments are JSON."""
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"])}}


CALLED: dict[str, Any] = {
    "model": SERVED_NAME,
    "messages": TURNS[:2],
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 1,
    "seed": 3,
    "n": 3,
    "max_tokens": 120,
}


@pytest.mark.parametrize("thinks", [False, True])
def test_forced_calls_are_parsed_and_equal_those_of_a_stream(client: OpenAI, thinks: bool) -> None:
    """If `thinks`, a logit bias opens the thinking, and the thinking budget ends it."""
    kwargs: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinks}}
    if thinks:
        kwargs |= {"thinking_token_budget": 8, "logit_bias": {THINK: 50}}
    whole = client.chat.completions.create(**CALLED, extra_body=kwargs)
    for choice in whole.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "alarm"
        said = json.loads(call.function.arguments)
        assert said.keys() == {"hour", "note"}
        assert said["hour"] in range(24)
        assert len(said["note"]) <= 6
        assert bool(folded(choice)[0]) == thinks
    assert [folded(choice) for choice in whole.choices] == streamed(client, kwargs)


def folded(choice: Any) -> tuple[str, str, str, str]:
    """Return the choice's reasoning, content, call arguments and finish reason."""
    message = choice.message
    thought, arguments = getattr(message, "reasoning", None), message.tool_calls[0].function
    return thought or "", message.content or "", arguments.arguments, choice.finish_reason


def streamed(client: OpenAI, kwargs: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Send CALLED as a stream. Return for each choice what `folded` returns."""
    parts = [["", "", "", ""] for _ in range(CALLED["n"])]
    for chunk in client.chat.completions.create(**CALLED, stream=True, extra_body=kwargs):
        for choice in chunk.choices:
            part, delta = parts[choice.index], choice.delta
            part[0] += getattr(delta, "reasoning", None) or ""
            part[1] += delta.content or ""
            for call in delta.tool_calls or []:
                part[2] += (call.function and call.function.arguments) or ""
            part[3] += choice.finish_reason or ""
    return [(part[0], part[1], part[2], part[3]) for part in parts]
