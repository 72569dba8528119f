"""A journal that is replayed with the weights gives the recorded tokens and logprobs."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine_core.journal.file import Writer, list_journals, read
from engine_core.journal.records import StartRecord
from protocol.engine.grammar import Grammar, Regex
from protocol.sdk.client import Client
from protocol.wire.errors import ContextTooLong
from tests.support.commands import CommandRun, run_command
from tests.support.grammars import signs_tokenizer
from tests.support.kernels import native_kernels
from tests.support.tiny_checkpoint import FITTING, write_tiny_llama
from tests.support.tiny_engine import tiny_engine

NUM_REFUSED, REFUSED_TOKENS = 4, 60_000
"""Number and length of prompts that are too long. They are refused but recorded, so they fill the
first file of a journal."""


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a journal of two files, which an engine with the compiled kernels has
    recorded."""
    native_kernels()
    folder, directory = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("journal")
    directory.chmod(0o700)
    model = write_tiny_llama(folder, max_position_embeddings=400, **FITTING)
    (model / "tokenizer.json").write_bytes(signs_tokenizer(markers=False))
    options: dict[str, Any] = {"journal": str(directory), "journal_mib": 1, "token_budget": 16}
    with tiny_engine(model=model, speculation="ngram", **options) as (program, address):
        with Client(address) as client:
            generate(client)
            for _ in range(NUM_REFUSED):
                with pytest.raises(ContextTooLong):
                    client.generate([3] * REFUSED_TOKENS).tokens()
            generate(client)
        program.signal(signal.SIGTERM)
        assert program.end() == 0
    return directory


def generate(client: Client) -> None:
    """Generate answers of every kind. Three prompts have a prefix of several chunks in common."""
    shared = [3, 4, 5] * 9
    sampled = [client.generate([*shared, n], max_tokens=7, logprobs=2) for n in range(3)]
    greedy = client.generate([5] * 40, max_tokens=5, temperature=0.0, prompt_logprobs=1)
    signs = Grammar(body=Regex(pattern="[ab]{9}c"))
    constrained = client.generate([7, 8], max_tokens=4, grammar=signs)
    assert all(answer.tokens() for answer in [*sampled, greedy, constrained])


def replayed(capfd: pytest.CaptureFixture[str], path: Path, *options: str) -> CommandRun:
    return run_command(capfd, "replay", "--weights", *options, str(path))


def test_all_tokens_and_logprobs_are_equal_also_in_files_that_follow(
    journal: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(list_journals(journal)) == 2
    done = replayed(capfd, journal)
    assert done.code == 0, done.out + done.err
    lines = [line for line in done.out.splitlines() if line.startswith("computed again: ")]
    assert len(lines) == 2
    for line in lines:
        tokens, logprobs = line.removeprefix("computed again: ").split(" tokens are equal, ")
        for counts in (tokens, logprobs.removesuffix(" logprobs")):
            equal, every = map(int, counts.split(" of "))
            assert equal == every > 20
    assert "the first difference" not in done.out


def test_a_later_file_alone_is_refused(journal: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = replayed(capfd, list_journals(journal)[1])
    assert done.code == 2
    assert "file 2 of its engine needs the K/V of the files before it" in done.err


def test_differences_are_shown_if_the_fingerprint_may_differ(
    journal: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The journal is replayed with another dtype than it was recorded with."""
    start, *records = read(list_journals(journal)[0])
    assert isinstance(start, StartRecord)
    worker = replace(start.config.worker, dtype="bfloat16")
    with contextlib.closing(Writer(tmp_path / "other", 1 << 24)) as writer:
        for record in [replace(start, config=replace(start.config, worker=worker)), *records]:
            writer.write(record)
    done = replayed(capfd, writer.path, "--any-fingerprint")
    assert done.code == 1, done.err
    assert "all decisions are the same" in done.out
    assert "\nthe first difference: record " in done.out
