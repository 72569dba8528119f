"""`tidegate bench step` runs the worker's benchmark in a child process and prints a table."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from protocol.tools.bench import PARTS, StepBenchLine, StepTiming
from tests.support.tiny_checkpoint import write_tiny_llama
from tools.__main__ import main
from tools.commands.bench_step import table

QUICK = ("--steps", "2", "--warm-up", "1", "--threads", "1", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


def test_every_requested_step_is_a_row(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "steps.json"
    options = ("--batch", "1,2", "--context", "5,40", "--json", str(file))
    assert main(["bench", "step", model, *options, *QUICK]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "float32, cpu, 1 threads; 1 new token per request, greedy" in first
    cells = [line.split() for line in lines[2:]]
    assert [row[:2] for row in cells] == [["5", "1"], ["5", "2"], ["40", "1"], ["40", "2"]]
    assert len(msgspec.json.decode(file.read_bytes(), type=list[StepBenchLine])) == 5


def test_steps_are_timed_with_keys_and_values_in_eight_bits(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", model, "--kv-dtype", "int8", "--context", "5", *QUICK]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_a_model_of_random_weights_needs_only_its_config(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path(shutil.copy(Path(model) / "config.json", tmp_path / "some-model.json"))
    assert main(["bench", "step", "--random", str(config), "--context", "5", *QUICK]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("some-model, float32")
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--random", "config.json", "a.gguf"], "MODEL and --random exclude each other", 2),
        (["--random", "/nowhere/config.json"], "/nowhere/config.json is not a JSON file", 5),
    ],
)
def test_a_bad_choice_of_the_model_is_refused(
    arguments: list[str], message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", *arguments]) == code
    assert message in capsys.readouterr().err


def test_an_option_that_the_worker_refuses_is_reported_in_one_line(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", model, "--context", "4000", *QUICK]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the model's context is 128 tokens" in line


def test_shares_divide_the_parts_and_token_rates_count_whole_steps() -> None:
    parts = dict.fromkeys(PARTS, 0.0) | {"linears": 0.003, "attention": 0.001}
    timing = StepTiming(
        batch=4,
        context=10,
        new_tokens=2,
        steps=1,
        step_s=0.002,
        best_s=0.001,
        p90_s=0.003,
        watched_s=0.004,
        parts_s=parts,
    )
    head, row = table([timing]).splitlines()
    assert row.split()[:6] == ["10", "4", "2.0", "1.0", "3.0", "4,000"]
    assert row.split()[6:] == ["75%", "25%", "0%", "0%", "0%", "0%"]
    assert head.split()[-3:] == ["other", "layers", "overhead"]
