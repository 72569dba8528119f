"""Profiles: one at a time, and ended when the client leaves. Also the trace file, and CPU times
from /proc."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from engine_core.profiling import Profiling
from protocol.engine.messages import Profile, Profiled, Refused
from protocol.process.process_state import program_name
from protocol.worker.steps import Trace, Traced
from tests.support.plans import slot_init, step_plan
from tests.support.tiny_model import tiny_cache, tiny_runner, tiny_slots
from tools.commands.profile import CpuSample, cores_used, descendants
from worker.step.tracing import Tracer

US, THEM = b"us", b"them"
REQUEST = Profile(request=7, steps=3, directory="/traces")
DONE = Traced(file="/traces/a.json.gz", steps=3, began=1.0, ended=2.0)


def started() -> Profiling:
    """Return a Profiling whose command has been sent to the worker."""
    profiling = Profiling()
    profiling.request(US, REQUEST)
    profiling.pop_command()
    return profiling


def test_a_profile_is_requested_once_and_answered_to_its_client() -> None:
    profiling = Profiling()
    assert profiling.pop_command() is None
    assert profiling.request(US, REQUEST) is None
    assert profiling.pop_command() == Trace(steps=3, directory="/traces")
    assert profiling.pop_command() is None
    reply = Profiled(request=7, file="/traces/a.json.gz", steps=3, began=1.0, ended=2.0)
    assert profiling.on_traced(DONE) == (US, reply)
    assert profiling.request(THEM, REQUEST) is None


def test_a_second_profile_is_refused_until_the_first_is_answered() -> None:
    profiling = Profiling()
    for prepare in (lambda: None, profiling.pop_command):
        profiling.request(US, REQUEST)
        prepare()
        refused = profiling.request(THEM, REQUEST)
        assert "another profile is being made" in refused.error.message


@pytest.mark.parametrize(
    ("profile", "field_name"),
    [
        (Profile(request=1, steps=0, directory="/a"), "steps"),
        (Profile(request=1, steps=10**6, directory="/a"), "steps"),
        (Profile(request=1, steps=1, directory="a"), "directory"),
        (Profile(request=1, steps=1, directory="/a\0b"), "directory"),
    ],
)
def test_an_invalid_profile_request_is_refused_and_blocks_no_other(
    profile: Profile, field_name: str
) -> None:
    profiling = Profiling()
    refused = profiling.request(US, profile)
    assert (refused.request, refused.error.param) == (1, field_name)
    assert profiling.request(THEM, REQUEST) is None


def test_a_profile_that_the_worker_could_not_write_is_reported() -> None:
    profiling = started()
    answer = profiling.on_traced(Traced(error="disk full"))
    assert answer is not None
    client, refused = answer
    assert client == US
    assert isinstance(refused, Refused)
    assert "disk full" in refused.error.message


@pytest.mark.parametrize("requests", [None, [5, 7]])
def test_a_client_that_leaves_before_the_profile_starts_cancels_it(
    requests: list[int] | None,
) -> None:
    profiling = Profiling()
    profiling.request(US, REQUEST)
    profiling.cancel(US, requests)
    assert profiling.pop_command() is None
    assert profiling.request(THEM, REQUEST) is None


def test_a_client_that_leaves_later_ends_the_profile_without_a_reply() -> None:
    profiling = started()
    profiling.cancel(US)
    assert profiling.request(THEM, REQUEST) is not None
    assert profiling.pop_command() == Trace(steps=0)
    assert profiling.pop_command() is None
    assert profiling.on_traced(DONE) is None
    assert profiling.request(THEM, REQUEST) is None


def test_a_trace_that_ends_while_cancelled_has_no_answer() -> None:
    profiling = started()
    profiling.cancel(US)
    assert profiling.on_traced(DONE) is None
    assert profiling.pop_command() is None


def test_a_cancel_of_another_client_changes_nothing() -> None:
    profiling = Profiling()
    profiling.request(US, REQUEST)
    profiling.cancel(THEM)
    profiling.cancel(US, [8])
    assert profiling.pop_command() is not None


# ---- the worker's part
def traced(directory: Path, *, wanted: int, made: int, ends: bool = False) -> Traced | None:
    """Request a trace of `wanted` steps, run `made` steps, and return the result."""
    tracer, runner = Tracer(), tiny_runner(tiny_slots(3), tiny_cache(8))
    tracer.on_trace(Trace(steps=wanted, directory=str(directory)))
    for step in range(made):
        init = slot_init(0, [5, 9, 2], generation=step + 1, blocks=[3])
        release = [(0, step)] if step else []
        tracer.before_step(step)
        runner.step(step_plan(step, release=release, bind=[init], rows=[(0, 0, 3, True)]))
        tracer.after_step(step)
    if ends:
        tracer.on_trace(Trace(steps=0))
    result = tracer.pop()
    assert tracer.pop() is None
    return result


def test_a_trace_is_a_private_file_with_the_work_of_the_steps(tmp_path: Path) -> None:
    result = traced(tmp_path / "new" / "traces", wanted=2, made=4)
    assert (result.error, result.steps) == ("", 2)
    assert result.began < result.ended
    file = Path(result.file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    names = [
        event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    ]
    assert names.count("aten::scaled_dot_product_attention") == 2


def test_a_trace_that_is_ended_early_has_the_steps_so_far(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    result = traced(tmp_path, wanted=9, made=1, ends=True)
    assert result.steps == 1
    assert Path(result.file).is_file()


def test_a_trace_without_any_step_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert traced(tmp_path, wanted=9, made=0) is None
    assert traced(tmp_path, wanted=9, made=0, ends=True) == Traced(error="no step was computed")


def test_a_directory_that_others_can_enter_is_refused_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    result = traced(tmp_path, wanted=1, made=1)
    assert "only its owner can enter" in result.error
    assert list(tmp_path.iterdir()) == []


# ---- the tool's part
def process(
    proc: Path, pid: int, parent: int, ticks: int, *words: str, name: str = "python"
) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    fields = [str(parent), *["0"] * 9, str(ticks), "0", *["0"] * 30]
    (folder / "stat").write_text(f"{pid} ({name}) S {' '.join(fields)}\n")
    (folder / "cmdline").write_bytes("\0".join(words).encode() + b"\0")


def test_a_server_is_its_process_and_all_descendants_of_any_name(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, 100, "/venv/bin/python", "-P", "-m", "tools", "serve")
    process(tmp_path, 11, 10, 200, "/venv/bin/python", "-P", "-m", "engine_core", name="a) R (b")
    process(tmp_path, 12, 11, 300, "/venv/bin/python", "-m", "worker", "-m", "x")
    process(tmp_path, 13, 1, 400, "/usr/bin/other")
    (tmp_path / "self").mkdir()
    assert descendants(10, tmp_path) == {10: 1.0, 11: 2.0, 12: 3.0}
    assert [program_name(pid, tmp_path) for pid in (10, 11, 12, 13)] == (
        ["tools", "engine_core", "worker", "other"]
    )
    assert program_name(99, tmp_path) == "?"
    assert descendants(99, tmp_path) == {}


def test_cpu_shares_are_those_of_the_samples_around_the_recording() -> None:
    samples = [CpuSample(float(at), {1: at * 0.5, 2: 0.0}) for at in range(10)]
    samples[5] = CpuSample(5.0, {1: 4.5, 3: 1.0})
    assert cores_used(samples, 2.5, 4.5) == {1: pytest.approx((4.5 - 1.0) / 3)}
    assert cores_used(samples, 6.2, 6.8) == {1: pytest.approx(0.5), 2: 0.0}
    assert cores_used(samples[:1], 0.0, 1.0) == {}
    assert cores_used([], 0.0, 1.0) == {}
