"""A server of a model that keeps a cache of its own: requests that run together have the answers
that each has alone, and a disconnect leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from protocol.process.exit_codes import ExitCode
from tests.support.checkpoints import write_directory
from tests.support.own_cache_models import random_own_cache
from tests.support.ports import free_port
from tests.support.processes import Program
from tests.support.server import SERVED_NAME, Server
from tests.support.waiting import eventually

ARCHITECTURE = "Gemma4UnifiedForConditionalGeneration"
"""Layers that share keys and values, beside a part for images."""
OPTIONS = (
    "--served-name",
    SERVED_NAME,
    "--max-slots",
    "4",
    "--token-budget",
    "16",
    "--speculation",
    "ngram",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_own_cache(ARCHITECTURE)
    return write_directory(tmp_path_factory.mktemp("own"), model)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    with Server(*OPTIONS, model=str(directory)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def answer(client: OpenAI, number: int, **options: Any) -> str:
    done = client.completions.create(
        model=SERVED_NAME,
        prompt=f"{'the ' * number}hat {number}",
        max_tokens=20,
        temperature=0,
        extra_body={"ignore_eos": True},
        **options,
    )
    assert done.usage is not None
    assert done.usage.completion_tokens == 20
    return done.choices[0].text


def test_answers_together_are_those_alone(client: OpenAI) -> None:
    alone = [answer(client, number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: answer(client, number), range(8))) == alone


def test_a_disconnect_leaves_nothing_to_the_next_request(client: OpenAI) -> None:
    alone = answer(client, 3)
    for _ in range(4):
        stream = client.completions.create(
            model=SERVED_NAME, prompt="the the hat", max_tokens=400, stream=True, temperature=0
        )
        next(iter(stream))
        stream.close()
    assert eventually(lambda: answer(client, 3) == alone)


def test_the_log_says_what_the_model_cannot_have(server: Server) -> None:
    said = "\n".join(server.err)
    assert f"{ARCHITECTURE} is computed by its class in transformers" in said
    assert "there are no drafts" in said


def test_an_image_is_refused_with_its_path(client: OpenAI) -> None:
    parts: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(BadRequestError, match=r"messages\[0\]\.content\[0\]\.type"):
        client.chat.completions.create(
            model=SERVED_NAME, messages=[{"role": "user", "content": parts}]
        )


@pytest.mark.parametrize(
    ("option", "words"),
    [("--kv-host-gib", ("--kv-host-gib", "0.1")), ("K/V transfer", ("--split",))],
)
def test_an_option_that_needs_blocks_is_refused_by_name(
    directory: Path, option: str, words: tuple[str, ...]
) -> None:
    command = ["-P", "-m", "tools", "serve", str(directory), "--port", str(free_port())]
    with Program([*command, *words]) as program:
        assert program.end(timeout_s=300) == ExitCode.BAD_MODEL
        assert f"keeps a cache of its own, so {option} is not possible" in program.output
