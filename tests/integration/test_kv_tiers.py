"""The tiers with a real engine and a real worker: blocks are computed once and then loaded, and
answers stay the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.engine.messages import Usage
from protocol.sdk.client import Client
from tests.support.processes import Program
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.waiting import eventually

BLOCK = 16
PROMPT = [3 + (7 * i * i + i) % 90 for i in range(20 * BLOCK + 5)]
LOADED = 20 * BLOCK
"""Tokens of PROMPT that can be loaded: those in its full blocks."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2000)


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Return the answer of an engine without tiers to PROMPT."""
    with served(checkpoint, tmp_path_factory.mktemp("plain")) as (_, engine):
        tokens, usage = generate(engine)
        assert (usage.cached_tokens, engine.stats.tier_blocks) == (0, {})
        return tokens


@pytest.fixture(scope="module")
def first_life(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the disk tier's directory of an engine that answered PROMPT once and was killed."""
    directory = tmp_path_factory.mktemp("first")
    with served(checkpoint, directory, kv_disk=str(directory / "kv")) as (program, engine):
        assert generate(engine)[1].cached_tokens == 0
        assert stored(engine, "disk", 20)
        program.signal(signal.SIGKILL)
        program.end()
    return directory / "kv"


@pytest.fixture
def disk(first_life: Path, tmp_path: Path) -> Path:
    """Return a copy of the directory `first_life`."""
    return Path(shutil.copytree(first_life, tmp_path / "kv"))


@contextmanager
def served(checkpoint: Path, directory: Path, **worker: object) -> Iterator[tuple[Program, Client]]:
    """Yield an engine, whose cache has space for little more than PROMPT, and a client of it."""
    (directory / "run").mkdir(mode=0o700)
    directory.chmod(0o700)
    address = f"ipc://{directory}/run/engine.sock"
    words = ["-P", "-m", "engine_core", "--config", config(checkpoint, address, **worker)]
    with Program(words) as program, Client(address, wait_s=60) as engine:
        yield program, engine


def config(checkpoint: Path, address: str, **worker: object) -> str:
    options = {
        "model": str(checkpoint),
        "dtype": "float32",
        "poison_slots": "wild",
        "max_slots": 4,
        "kv_blocks": 25,
        "threads": 1,
    }
    return json.dumps({"address": address, "token_budget": 64, "worker": options | worker})


def generate(engine: Client, prompt: list[int] = PROMPT) -> tuple[list[int], Usage]:
    """Return the answer and its usage. The answer fills no block, so that no block is being written
    once those of the prompt are stored."""
    outputs = list(engine.generate(prompt, max_tokens=10, temperature=0.0, ignore_eos=True))
    usage = outputs[-1].usage
    assert usage is not None
    return [token for output in outputs for token in output.tokens], usage


def stored(engine: Client, tier: str, blocks: int) -> bool:
    return eventually(lambda: engine.stats.tier_blocks.get(tier, 0) >= blocks)


def test_a_prompt_is_loaded_from_disk_after_a_restart(
    checkpoint: Path, tmp_path: Path, disk: Path, plain: list[int]
) -> None:
    with served(checkpoint, tmp_path, kv_disk=str(disk)) as (_, engine):
        tokens, usage = generate(engine)
        assert tokens == plain
        assert (usage.cached_tokens, usage.fetched_tokens) == (LOADED, 0)
        assert eventually(lambda: engine.stats.num_finished)
        assert engine.stats.num_tier_loaded == {"disk": 20}
        computed = len(PROMPT) - LOADED + len(plain) - 1
        assert engine.stats.num_computed_tokens == computed


def test_a_damaged_file_is_computed_again_and_written_anew(
    checkpoint: Path, tmp_path: Path, disk: Path, plain: list[int]
) -> None:
    (directory,) = disk.iterdir()
    whole = {path: path.read_bytes() for path in directory.iterdir()}
    for path, content in whole.items():
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with served(checkpoint, tmp_path, kv_disk=str(disk)) as (program, engine):
        tokens, usage = generate(engine)
        assert (tokens, usage.cached_tokens) == (plain, 0)
        assert eventually(lambda: engine.stats.num_finished)
        assert engine.stats.num_fetches_failed == {"damaged": 1}
        assert engine.stats.num_tier_failed == {"disk": 1}
        assert stored(engine, "disk", 20)  # one fewer after the failure
        program.signal(signal.SIGTERM)
        assert program.end() == 0
    written_anew = [path for path in whole if path.read_bytes() == whole[path]]
    assert len(written_anew) == 1, "the other files were not read"


def test_a_directory_that_others_can_enter_is_refused_by_name(
    checkpoint: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "kv"
    disk.mkdir()
    os.chmod(disk, 0o755)
    (tmp_path / "run").mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/run/engine.sock"
    words = ["-P", "-m", "engine_core", "--config", config(checkpoint, address, kv_disk=str(disk))]
    with Program(words) as program:
        assert program.end() == 3
        assert f"{disk} must be a directory that only its owner can enter" in program.output
