"""The whole server with a real model over HTTP: many requests at once, seeds, disconnects."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests
from openai import OpenAI

from protocol.sdk.client import Client
from tests.support.docs_blocks import blocks_of
from tests.support.engine_view import EngineView
from tests.support.ports import free_port
from tests.support.processes import ROOT
from tests.support.reference import GOLDEN
from tests.support.server import SERVED_NAME, Server

pytestmark = pytest.mark.long

STREAMS, STREAM_TOKENS = 64, 12
GREEDY_TOKENS = 24
DISCONNECTS = 200


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Yield a server with the default options."""
    with Server("--served-name", SERVED_NAME, "--drain-s", "2") as running:
        yield running


@contextmanager
def sdk(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with sdk(server) as client:
        yield client


@pytest.fixture
def exact_client(exact_server: Server) -> Iterator[OpenAI]:
    with sdk(exact_server) as client:
        yield client


@pytest.fixture
def view(server: Server) -> Iterator[EngineView]:
    view = EngineView(server.address)
    yield view
    view.close()


def test_the_first_request_of_the_readme_has_its_answer(
    server: Server, exact_server: Server
) -> None:
    """The default settings round the inputs of products. The first answer that a user sees must
    not depend on that."""
    blocks = [*blocks_of(ROOT / "README.md")]
    place = next(n for n, block in enumerate(blocks) if block.text.startswith("curl "))
    request, shown = blocks[place : place + 2]
    body = json.loads(request.text.partition("-d '")[2].rstrip().removesuffix("'"))
    said = json.loads(shown.text)["choices"][0]["message"]["content"]
    assert len(said.splitlines()) == 3
    for each in (server, exact_server):
        asked = body | {"model": SERVED_NAME}
        answer = requests.post(f"{each.url}/v1/chat/completions", json=asked, timeout=300).json()
        assert answer["choices"][0]["message"]["content"] == said


def test_sixty_four_streams_get_each_their_own_answer(client: OpenAI, view: EngineView) -> None:
    """Each stream requests its own token, by a bias that leaves no other choice."""

    def ask(number: int) -> tuple[list[int], str, Any]:
        wanted = 1000 + 7 * number
        stream = client.completions.create(
            model=SERVED_NAME,
            prompt=[5 + number] * (1 + number // 2),
            max_tokens=STREAM_TOKENS,
            temperature=1,
            logit_bias={str(wanted): 100},
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        tokens: list[int] = []
        finish, usage = "", None
        for chunk in stream:
            for choice in chunk.choices:
                tokens += getattr(choice, "token_ids", [])
                finish = choice.finish_reason or finish
            usage = chunk.usage or usage
        return tokens, finish, usage

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = list(pool.map(ask, range(STREAMS)))
    for number, (tokens, finish, usage) in enumerate(answers):
        assert tokens == [1000 + 7 * number] * STREAM_TOKENS
        assert finish == "length"
        assert usage.completion_tokens == STREAM_TOKENS
        assert usage.prompt_tokens == 1 + number // 2
    view.wait_until_free()


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"alarm", "light"}),
        ({"type": "function", "function": {"name": "alarm"}}, {"alarm"}),
    ],
    ids=["required", "named"],
)
def test_required_calls_are_made_at_temperature_1(
    client: OpenAI, choice: Any, names: set[str]
) -> None:
    """tests/integration/test_required_calls.py has a hundred such calls, of a model with random
    weights."""
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
                    "required": ["hour"],
                    "additionalProperties": False,
                },
            },
        }
        for name in ("alarm", "light")
    ]
    answer = client.chat.completions.create(
        model=SERVED_NAME,
        messages=[{"role": "user", "content": "Is it going to rain?"}],
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=1,
        seed=1,
        max_tokens=60,
        n=4,
    )
    for each in answer.choices:
        assert each.finish_reason == "tool_calls"
        (call,) = each.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name in names
        assert json.loads(call.function.arguments)["hour"] in range(24)


def test_greedy_answers_over_http_equal_transformers(exact_client: OpenAI) -> None:
    """Sixteen requests run at once, among them the longest. Ties of the reference are accepted as
    in tests/differential, which compares more and longer answers."""
    rows = json.loads(GOLDEN.read_text())[1::2]

    def ask(row: dict[str, Any]) -> list[int]:
        answer = exact_client.completions.create(
            model=SERVED_NAME,
            prompt=row["prompt"],
            max_tokens=GREEDY_TOKENS,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        choice: Any = answer.choices[0]
        tokens: list[int] = choice.token_ids
        return tokens

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, rows))
    for row, answer in zip(rows, answers, strict=True):
        assert len(answer) == GREEDY_TOKENS
        if answer != row["tokens"][:GREEDY_TOKENS]:
            at = next(i for i in range(GREEDY_TOKENS) if answer[i] != row["tokens"][i])
            assert row["gaps"][at] <= 1e-4


def sampled(client: OpenAI, seed: int, n: int = 1) -> list[list[int]]:
    answer = client.completions.create(
        model=SERVED_NAME,
        prompt="Once upon a time",
        max_tokens=24,
        temperature=1,
        top_p=0.95,
        seed=seed,
        n=n,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choices: list[Any] = list(answer.choices)
    return [choice.token_ids for choice in choices]


def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(exact_client: OpenAI) -> None:
    alone = [sampled(exact_client, seed)[0] for seed in range(4)]
    with ThreadPoolExecutor(16) as pool:
        crowd = list(pool.map(lambda i: sampled(exact_client, i % 4)[0], range(16)))
    assert crowd == alone * 4
    assert len({tuple(tokens) for tokens in alone}) == 4


def test_four_choices_with_a_seed_differ_and_repeat(exact_client: OpenAI) -> None:
    first, second = sampled(exact_client, 5, n=4), sampled(exact_client, 5, n=4)
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 4


def hang_up_somewhere(server: Server, dice: random.Random) -> None:
    """Request a long answer, read for a random time, and hang up."""
    body = json.dumps(
        {
            "model": SERVED_NAME,
            "prompt": [dice.randrange(1000)] * dice.randrange(1, 100),
            "max_tokens": 1000,
            "ignore_eos": True,
            "stream": dice.random() < 0.5,
            "n": dice.choice([1, 1, 2]),
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(head.encode() + body)
        sock.settimeout(dice.random() * 0.5)
        try:
            for _ in range(dice.randrange(1, 6)):
                sock.recv(4096)
        except TimeoutError:
            pass


def test_after_two_hundred_disconnects_nothing_is_held(server: Server, view: EngineView) -> None:
    before = view.stats()

    def storm(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(DISCONNECTS // 8):
            hang_up_somewhere(server, dice)

    threads = [threading.Thread(target=storm, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    view.wait_until_free()
    after = view.stats()
    accepted = after.num_accepted - before.num_accepted
    ended = sum(after.num_finished.values()) - sum(before.num_finished.values())
    assert accepted == ended >= DISCONNECTS * 0.5


def test_the_zeromq_client_generates_from_token_ids(exact_server: Server) -> None:
    row = json.loads(GOLDEN.read_text())[0]
    with Client(exact_server.address) as engine:
        assert engine.model.vocab_size == 49152
        answer = engine.generate(row["prompt"], temperature=0, max_tokens=8, ignore_eos=True)
        assert answer.tokens() == row["tokens"][:8]


def test_leaving_a_generation_early_aborts_it(server: Server, view: EngineView) -> None:
    aborted = view.stats().num_finished.get("abort", 0)
    with Client(server.address) as engine:
        for output in engine.generate([1, 2, 3], max_tokens=1000, ignore_eos=True):
            assert output.tokens
            break
        view.wait_until_free()
    assert view.stats().num_finished["abort"] == aborted + 1


def test_an_unserved_port_is_reported_plainly(tmp_path: Any) -> None:
    from protocol.wire.errors import EngineNotReady

    with pytest.raises(EngineNotReady, match="no engine answered"):
        Client(f"ipc://{tmp_path}/{free_port()}.sock", wait_s=0.3)
