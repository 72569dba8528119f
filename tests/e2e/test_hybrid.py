"""A server of a hybrid: the text part of Qwen3.5, with the features that are on by default. The
next turn of a conversation computes little more than its new text, and no request sees another's
state."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest
import requests
from openai import OpenAI

from protocol.process.exit_codes import ExitCode
from protocol.shared.watch import WatchFrame
from tests.support.checkpoints import write_directory
from tests.support.http import metric_of
from tests.support.ports import free_port
from tests.support.processes import Program
from tests.support.server import SERVED_NAME, Server
from tests.support.waiting import eventually

BLOCK_TOKENS = 16
OPTIONS = ("--served-name", SERVED_NAME, "--max-slots", "4", "--token-budget", "32")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Every process of pytest reads this file, and this import takes 2 s of CPU time.
    from tests.support.wrapper_models import random_wrapper

    model = random_wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5_text")
    return write_directory(tmp_path_factory.mktemp("hybrid"), model)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    with Server(*OPTIONS, model=str(directory)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def answer(client: OpenAI, prompt: list[int], max_tokens: int = 20) -> tuple[list[int], int]:
    """Return the tokens of a greedy answer, and how many tokens of the prompt were cached."""
    done = client.completions.create(
        model=SERVED_NAME,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert done.usage is not None
    assert done.usage.prompt_tokens_details is not None
    tokens = done.choices[0].model_dump()["token_ids"]
    return tokens, done.usage.prompt_tokens_details.cached_tokens or 0


def prompt_of(number: int) -> list[int]:
    return [3 + (number * 7 + at * at) % 200 for at in range(20 + 9 * number)]


def test_answers_together_are_those_alone(client: OpenAI) -> None:
    prompts = [prompt_of(number) for number in range(8)]
    alone = [answer(client, prompt)[0] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = [*pool.map(lambda prompt: answer(client, prompt)[0], prompts)]
    assert together == alone


def test_each_turn_of_a_conversation_computes_its_new_text_and_at_most_a_block(
    client: OpenAI,
) -> None:
    history = [5, 9, *prompt_of(3)]
    for turn in range(6):
        history += [11 + turn, 7, 13]
        known = len(history) - 3
        tokens, cached = answer(client, history, max_tokens=25)
        if turn:
            # The answer's last token was never computed.
            assert known - 1 - cached <= BLOCK_TOKENS
        history += tokens


def test_a_disconnect_leaves_nothing_to_the_next_request(client: OpenAI) -> None:
    alone, _ = answer(client, prompt_of(2))
    for _ in range(4):
        stream = client.completions.create(
            model=SERVED_NAME, prompt=prompt_of(2), max_tokens=400, stream=True, temperature=0
        )
        next(iter(stream))
        stream.close()
    assert eventually(lambda: answer(client, prompt_of(2))[0] == alone)


def tidegate(*words: str) -> str:
    command = [sys.executable, "-P", "-m", "tools", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_memory_of_states_is_shown_to_clients_and_operators(
    server: Server, client: OpenAI
) -> None:
    answer(client, prompt_of(7))
    metrics = requests.get(f"{server.url}/metrics", timeout=20).text

    def metric(name: str) -> int:
        start = f"tidegate_engine_{name}"
        (line,) = [line for line in metrics.splitlines() if line.startswith(start)]
        return int(float(line.split()[1]))

    one = client.models.list().data[0].model_dump()["states"]
    assert one["num_checkpoints"] == metric("total_checkpoints") == 16
    assert metric("reserved_state_bytes") == (4 + 16) * one["bytes"]
    used = metric("cached_checkpoints") + metric("held_checkpoints")
    assert metric('state_bytes{place="checkpoints"}') == used * one["bytes"] > 0
    assert metric('evicted_checkpoints_total{lack="blocks"}') == 0
    assert "states of 4 slots and 16 checkpoints=" in server.output
    status = tidegate("status", "--port", str(server.port))
    size = f"{one['bytes'] / (1 << 20):.1f} MiB each"
    states = rf"^states .* in use \({size}\); \d+ of 16 checkpoints, \d+ of"
    assert re.search(states, status, re.MULTILINE)
    top = tidegate("top", "--once", "--port", str(server.port))
    assert re.search(rf"^states .* cached, .* MiB of .* MiB, {size}$", top, re.MULTILINE)
    (frame,) = [
        msgspec.json.decode(line.removeprefix("data: "), type=WatchFrame)
        for line in requests.get(f"{server.url}/v1/watch?frames=1", timeout=20).text.splitlines()
        if line.startswith("data: {")
    ]
    assert frame.engines[0].stats.total_checkpoints == 16


def serve_command(directory: Path) -> list[str]:
    return ["-P", "-m", "tools", "serve", str(directory), "--port", str(free_port())]


def test_a_hybrid_is_refused_as_a_draft_model(directory: Path) -> None:
    words = ("--speculation", "model", "--draft-model", str(directory))
    with Program([*serve_command(directory), *words]) as program:
        assert program.end(timeout_s=300) == ExitCode.BAD_MODEL
        assert "recurrent layers, so it cannot be a draft model" in program.output


def test_a_split_server_gives_the_answers_of_the_plain_one(directory: Path, client: OpenAI) -> None:
    prompts = [prompt_of(number) for number in range(6)]
    alone = [answer(client, prompt)[0] for prompt in prompts]
    with (
        Server(*OPTIONS, "--split", "--split-min-tokens", "2", model=str(directory)) as split,
        client_of(split) as own,
    ):
        with ThreadPoolExecutor(3) as pool:
            found = [*pool.map(lambda prompt: answer(own, prompt), prompts)]
        assert [tokens for tokens, _ in found] == alone
        assert metric_of(split.url, "tidegate_handovers_total") == len(prompts)
        moved = sum((len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts)
        fetched = "tidegate_engine_fetched_tokens_total"
        assert eventually(lambda: metric_of(split.url, fetched) == moved)


def test_states_without_checkpoints_are_refused_with_an_option_that_moves_keys_and_values(
    directory: Path,
) -> None:
    with Program([*serve_command(directory), "--split", "--no-prefix-cache"]) as program:
        assert program.end(timeout_s=300) == ExitCode.USAGE
        assert "--no-prefix-cache is set: serve it without --split" in program.output


def test_a_prompt_is_found_on_disk_after_a_restart(
    directory: Path, client: OpenAI, tmp_path: Path
) -> None:
    prompt = prompt_of(11)
    alone, _ = answer(client, prompt)
    stored = "tidegate_engine_tier_blocks_stored_total"
    for num_found in (0, (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS):
        with Server(*OPTIONS, "--kv-disk", str(tmp_path / "kv"), model=str(directory)) as server:
            assert answer(client_of(server), prompt) == (alone, num_found)
            assert num_found or eventually(partial(metric_of, server.url, stored))


def test_a_conversation_that_the_cache_has_lost_is_found_in_host_memory(
    directory: Path, client: OpenAI
) -> None:
    prompt = prompt_of(11)
    alone, _ = answer(client, prompt)
    memory = ("--kv-host-gib", "0.05", "--kv-blocks", "17", "--max-len", "200")
    with Server(*OPTIONS, *memory, model=str(directory)) as server:
        own = client_of(server)
        assert answer(own, prompt) == (alone, 0)
        for number in (8, 9, 10, 12):
            answer(own, prompt_of(number))
        tokens, cached = answer(own, prompt)
        assert (tokens, cached) == (alone, (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        loaded = "tidegate_engine_tier_blocks_loaded_total"
        assert eventually(lambda: metric_of(server.url, loaded) > cached // BLOCK_TOKENS)
