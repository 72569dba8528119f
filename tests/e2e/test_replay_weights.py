"""The journal of an engine with the default model is replayed with the weights of the model."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from protocol.sdk.client import Client
from tests.support.commands import run_command
from tests.support.kernels import native_kernels
from tests.support.model import smollm2_gguf
from tests.support.tiny_engine import tiny_engine

NUM_TOKENS = 12


def test_a_journal_of_the_default_model_gives_the_same_tokens_and_logprobs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    native_kernels()
    directory = tmp_path / "journal"
    with tiny_engine(model=smollm2_gguf(), journal=str(directory)) as (program, address):
        with Client(address) as client:
            answers = [
                client.generate(
                    [1, 2 + n, *range(300, 340)],
                    max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                    temperature=float(n),
                    logprobs=2,
                )
                for n in range(3)
            ]
            tokens = [answer.tokens() for answer in answers]
        program.signal(signal.SIGTERM)
        assert program.end() == 0
    count = sum(map(len, tokens))
    assert count == len(answers) * NUM_TOKENS
    done = run_command(capfd, "replay", "--weights", str(directory))
    assert done.code == 0, done.out + done.err
    equal = f"{count} of {count}"
    assert f"computed again: {equal} tokens are equal, {equal} logprobs" in done.out
