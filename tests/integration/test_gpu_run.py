"""`python -m tests.gpu`: a rehearsal runs every stage on the CPU, and no stage ends the run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from tests.gpu.__main__ import has_gpu, main, run_all
from tests.gpu.processes import GpuStage
from tests.gpu.session import GpuSession
from tests.gpu.stages import STAGES
from tests.gpu.table import GpuRow, NotPossible, failed, figure, markdown, passed

HERE = "tests.integration.test_gpu_run"
pytestmark = pytest.mark.long


# ---- stages, which the tests below run
def passes(session: GpuSession) -> Iterator[GpuRow]:
    yield passed("one", "equal")


def raises(session: GpuSession) -> Iterator[GpuRow]:
    yield passed("before", "equal")
    raise ValueError("a | b\nmore")


def lacks_a_tool(session: GpuSession) -> Iterator[GpuRow]:
    yield passed("before", "equal")
    raise NotPossible("no such tool")


def lacks_a_package(session: GpuSession) -> Iterator[GpuRow]:
    yield passed("before", "equal")
    import_module("no_such_package.part")


def misses_a_module_of_ours(session: GpuSession) -> Iterator[GpuRow]:
    yield passed("before", "equal")
    import_module("tests.no_such_module")


def crashes(session: GpuSession) -> Iterator[GpuRow]:
    yield passed("before", "equal")
    os.abort()


def hangs(session: GpuSession) -> Iterator[GpuRow]:
    yield passed("before", "equal")
    threading.Event().wait()


def rows_of(folder: Path, *functions: str, limit_s: float = 60) -> list[tuple[str, str, str]]:
    """Return (stage, outcome, text) for all rows of stages with these functions."""
    stages = [
        GpuStage(name=name, function=f"{HERE}:{name}", limit_s=3 if name == "hangs" else 60)
        for name in functions
    ]
    rows = run_all(stages, GpuSession(folder, is_rehearsal=True), limit_s=limit_s)
    return [(row.stage, row.outcome, row.text) for row in rows if row.name != "before"]


# ---- stages that fail
def test_a_stage_that_fails_is_a_row_and_does_not_end_the_run(tmp_path: Path) -> None:
    names = ("raises", "lacks_a_tool", "lacks_a_package", "misses_a_module_of_ours", "passes")
    assert rows_of(tmp_path, *names) == [
        ("raises", "failed", "ValueError: a | b"),
        ("lacks_a_tool", "not run", "no such tool"),
        ("lacks_a_package", "not run", "no_such_package is not installed"),
        (
            "misses_a_module_of_ours",
            "failed",
            "ModuleNotFoundError: No module named 'tests.no_such_module'",
        ),
        ("passes", "passed", "equal"),
    ]
    table = (tmp_path / "gpu.md").read_text()
    assert "| raises | the stage | ValueError: a \\| b |  | failed |" in table
    assert "Traceback" in (tmp_path / "raises.log").read_text()


def test_a_stage_that_crashes_or_hangs_is_a_row(tmp_path: Path) -> None:
    crash, hang, after = rows_of(tmp_path, "crashes", "hangs", "passes")
    assert crash[:2] == ("crashes", "failed")
    assert crash[2].startswith("it ended with code -6; see ")
    assert hang == ("hangs", "failed", "it took longer than 3 s")
    assert after == ("passes", "passed", "equal")


def test_stages_after_the_limit_are_not_run(tmp_path: Path) -> None:
    assert rows_of(tmp_path, "passes", limit_s=0) == [
        ("passes", "not run", "the run has taken 0 s")
    ]


# ---- the table
def test_a_missed_goal_is_no_failure() -> None:
    rows = [figure("a", 2.0, "ms", at_most=1), figure("b", 2.0, "x", at_least=1), failed("c", "")]
    assert [row.outcome for row in rows] == ["missed", "met", "failed"]
    page = markdown({"GPU": "none"}, rows, title="Figures")
    assert "- GPU: none" in page
    assert "|  | a | 2 ms | <= 1 ms | missed |" in page


# ---- the rehearsal
def test_the_rehearsal_runs_every_stage(tmp_path: Path) -> None:
    assert main(["--rehearse", "--out", str(tmp_path), "--limit-s", "1000"]) == 0
    found = msgspec.json.decode((tmp_path / "gpu.json").read_bytes())
    rows = msgspec.convert(found["rows"], list[GpuRow])
    outcomes = {
        stage.name: {row.outcome for row in rows if row.stage == stage.name} for stage in STAGES
    }
    assert all(outcomes.values()), outcomes
    assert "failed" not in set().union(*outcomes.values())


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_to_rehearse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path)]) == 2
    assert "--rehearse" in capsys.readouterr().out
