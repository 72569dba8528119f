"""`tidegate simulate` runs the simulator in a child process and prints its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_core.journal.file import Writer, list_journals
from engine_core.journal.recorder import RecordedEngine
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.messages import Generate
from protocol.engine.sampling import SamplingParams
from protocol.tools.bench import StepBenchReady
from simulator.measured import read_measurements
from simulator.replica import simulated_card
from simulator.requests import Segment, prompt_of
from tests.support.engines import Bench
from tests.support.tiny_checkpoint import write_tiny_llama
from tools.__main__ import main
from tools.commands import simulate

SHORT = ("--rate", "30", "--duration-s", "4", "--input-tokens", "200", "--output-tokens", "20")


def run(*options: str, file: Path, code: int = 0) -> list[Any]:
    """Run the command, and return the results that it writes to a file."""
    assert main(["simulate", *options, *SHORT, "--json", str(file)]) == code
    _, machine, *results = json.loads(file.read_text())
    assert machine["type"] == "machine"
    return results


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without what depends on the speed of this machine."""
    routing = {name: value for name, value in result["routing"].items() if name != "cpu_s"}
    return {**result, "routing": routing, "wall_s": 0}


def test_the_result_is_a_table_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    (result,) = run("qwen3-8b", "--html", str(page), file=tmp_path / "result.json")
    out = capsys.readouterr().out
    assert "estimated for qwen3-8b on H100" in out
    assert "all replicas, with the real engine" in out
    assert out.splitlines()[-1].startswith("1 replica: 99 % of the first tokens within ")
    assert result["figures"]["num_completed"] == result["figures"]["num_requests"] > 80
    assert page.read_text().count("<svg") == 2


def test_a_hybrid_has_the_memory_of_its_states_and_what_they_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["qwen3.5-9b", "--replicas", "2", "--gateways", "2", "--processes", "2"]
    options += ["--prefix-tokens", "600", "--state-interval", "512", "--max-slots", "16"]
    (result,) = run(*options, file=tmp_path / "result.json")
    assert result["exact"] == 2
    out = capsys.readouterr().out
    states = "recurrent states: 50.2 MiB for each slot and for 64 checkpoints, 3.93 GiB in all"
    assert states in out
    prefix = "32.0 KiB of K/V for each token, and a checkpoint at its end and after each 512 tokens"
    assert f"a cached prefix: {prefix}" in out
    assert "prompt tokens computed again" in out
    assert result["states"]["num_uncovered_tokens"] > 0


def test_several_processes_give_the_results_of_one(tmp_path: Path) -> None:
    options = ["qwen3-8b", "--replicas", "5", "--gateways", "3", "--exact", "2"]
    options += ["--prefix-tokens", "100", "--prefixes", "7", "--max-waiting", "1"]
    one = run(*options, file=tmp_path / "one.json")
    two = run(*options, "--processes", "2", file=tmp_path / "two.json")
    for first, second in zip(map(without_times, one), map(without_times, two), strict=True):
        first["routing"].pop("imbalance"), second["routing"].pop("imbalance")
        means = [first["figures"].pop(name) for name in ("ttft", "tpot", "gap", "e2e")]
        others = [second["figures"].pop(name) for name in ("ttft", "tpot", "gap", "e2e")]
        for mean, other in zip(means, others, strict=True):  # sums in another order
            assert mean == pytest.approx(other)
        assert first["figures"] == second["figures"]
        assert first["seconds"] == second["seconds"]


def test_a_search_prints_each_size_and_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("qwen3-8b", "--hardware", "L40S", "--target-ttft-p99", "0.14")
    results = run(*options, file=tmp_path / "search.json")
    assert [result["replicas"] for result in results[:2]] == [1, 2]
    assert results[-1]["meets_target"]
    assert results[-1]["exact"] > 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{results[-1]['replicas']} replicas: ")
    assert last.endswith("which meets the target of 140 ms")


def test_a_target_that_is_missed_is_an_error(tmp_path: Path) -> None:
    options = ("qwen3-8b", "--target-ttft-p99", "0.001", "--max-replicas", "2")
    results = run(*options, file=tmp_path / "search.json", code=1)
    assert [result["meets_target"] for result in results] == [False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "MODEL: 'nothing' is not in the table; it has llama-3.1-8b"),
        (["qwen3.5-9b", "--tensor-parallel", "2"], "does not divide models with recurrent layers"),
        (["llama-3.1-70b"], "weights leave no room for K/V in 1 x 80 GiB (--tensor-parallel)"),
        (["qwen3-8b", "--hardware", "GTX"], "--hardware: 'GTX' is not in the table"),
        (["qwen3-8b", "--workload", "chat", "--trace", "x"], "--workload cannot be combined with"),
        (["qwen3-8b", "--trace", "/nowhere"], "/nowhere"),
        ([], "MODEL or --steps is needed"),
        (["--steps", "/nowhere.json"], "/nowhere.json"),
        (["--measure"], "--measure needs MODEL and --steps FILE"),
    ],
)
def test_a_bad_option_is_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_tables_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    out = capfd.readouterr().out
    assert "H200" in out
    assert "llama-3.1-70b" in out


def test_steps_are_measured_and_then_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "MEASURED", ((1, (1, 4), (8, 64)), (16, (1,), (0,))))
    model, steps = str(write_tiny_llama(tmp_path)), tmp_path / "steps.json"
    assert main(["simulate", model, "--measure", "--steps", str(steps)]) == 0
    found = read_measurements(str(steps))
    assert [step.work.decodes for step in found.steps] == [1, 4, 1, 4, 0]
    assert found.steps[-1].work.chunk_tokens == 16
    assert main(["simulate", "--steps", str(steps), *SHORT]) == 2
    assert "--kv-blocks is needed" in capsys.readouterr().err
    assert main(["simulate", "--steps", str(steps), "--kv-blocks", "4000", *SHORT]) == 0
    assert "5 measured steps of" in capsys.readouterr().out


def test_a_file_that_is_no_measurement_is_refused(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text('[{"type": "other"}]\n')
    with pytest.raises(ValueError, match="is not the JSON of bench step"):
        read_measurements(str(tmp_path / "steps.json"))
    with pytest.raises(ValueError, match="contains no journal"):
        read_measurements(str(tmp_path))


def test_a_journal_contains_the_time_of_every_step(tmp_path: Path) -> None:
    bench = Bench(num_blocks=200, token_budget=16)
    writer = Writer(tmp_path, max_bytes=1 << 20)
    engine = RecordedEngine(writer, bench.config, simulated_card(), bench.limits)
    bench.engine = engine
    for number in (1, 2):
        prompt = prompt_of((Segment(number, 20),))
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        engine.add(b"client", Generate(request=number, prompt=prompt, params=params))
        bench.outputs[b"client", number] = []
    elapsed = iter((0.5, 0.25, 0.125, 0.0625, 0.03, 0.02))
    while bench.plan() is not None:
        bench.finish(next(elapsed))
    writer.close()
    (path,) = list_journals(tmp_path)
    found = read_measurements(str(path))
    assert found.limits == bench.limits
    assert [step.seconds for step in found.steps[:3]] == [0.5, 0.25, 0.125]
    assert [step.work.decodes + step.work.chunk_tokens for step in found.steps[:3]] == [16, 16, 9]


def test_a_measured_worker_says_whether_it_has_a_gpu(tmp_path: Path) -> None:
    for device, is_gpu in (("cpu", False), ("cuda:0", True)):
        ready = StepBenchReady(model="m", dtype="bfloat16", device=device, threads=1, phases=[])
        (tmp_path / "steps.json").write_bytes(msgspec.json.encode([ready]))
        assert read_measurements(str(tmp_path / "steps.json")).is_gpu is is_gpu


def test_engine_options_are_followed(tmp_path: Path) -> None:
    engine = EngineConfig(worker=WorkerConfig(model=""))
    assert engine.max_waiting > 2
    options = ("qwen3-8b", "--hardware", "L4", "--max-waiting", "2", "--max-slots", "2")
    (result,) = run(*options, file=tmp_path / "result.json")
    assert result["figures"]["num_refused"] > 0
