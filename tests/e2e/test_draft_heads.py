"""A server whose model proposes tokens with its own head: its answers are those of a server without
drafts, and a checkpoint without a head is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import requests

from protocol.process.exit_codes import ExitCode
from tests.support.checkpoints import random_llama, write_directory
from tests.support.draft_heads import write_with_head
from tests.support.http import metric_of
from tests.support.ports import free_port
from tests.support.processes import Program
from tests.support.server import SERVED_NAME, Server

OPTIONS = ("--served-name", SERVED_NAME, "--max-slots", "4")


def answers(server: Server) -> list[list[int]]:
    """Return two sampled answers, and one that is the likeliest, to a prompt of token ids."""
    found = []
    for more in ({"n": 2, "temperature": 0.8, "seed": 4}, {"temperature": 0}):
        body: dict[str, Any] = {"model": SERVED_NAME, "prompt": [*range(5, 30)], "max_tokens": 40}
        body |= {"ignore_eos": True, "return_token_ids": True, **more}
        reply = requests.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert reply.ok, reply.text
        found += [choice["token_ids"] for choice in reply.json()["choices"]]
    return found


def test_answers_with_the_models_own_head_are_those_without(tmp_path: Path) -> None:
    write_with_head(tmp_path, "glm4_moe", is_right=True)
    with Server(*OPTIONS, model=str(tmp_path)) as plain:
        expected = answers(plain)
    with Server(*OPTIONS, "--speculation", "mtp", model=str(tmp_path)) as fast:
        assert answers(fast) == expected
        assert metric_of(fast.url, "tidegate_engine_accepted_tokens_total") > 0


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    write_directory(tmp_path, random_llama())
    command = ["-P", "-m", "tools", "serve", str(tmp_path)]
    options = ("--port", str(free_port()), "--speculation", "mtp")
    with Program([*command, *options]) as program:
        assert program.end(timeout_s=300) == ExitCode.BAD_MODEL
        assert "has no head for multi-token prediction" in program.output
        assert "--speculation ngram" in program.output
