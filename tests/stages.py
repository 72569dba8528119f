"""Runs the whole suite in stages, all of them even if one fails, and prints a summary.

`make test` runs this; arguments go to every stage's pytest:

    python -m tests.stages -k stream
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import oldest

PYTEST = (sys.executable, "-m", "pytest")
OPTIONS = ("-ra", "--durations=10")
PASSED, NO_TEST_MATCHES = 0, 5  # pytest's exit codes
INTEGRATION = Path(__file__).parent / "integration"


@dataclass(frozen=True)
class Stage:
    name: str
    why: str
    arguments: Sequence[str]
    program: Sequence[str] = PYTEST


def files_at_a_time(count: int) -> list[str]:
    """Return the options that run a file's tests in one process, and files in their order."""
    return ["--numprocesses", str(count), "--dist", "loadfile", "--no-loadscope-reorder"]


def files_with(words: str) -> list[str]:
    """Return the integration tests that contain `words`. pytest would first import all of them."""
    return [
        str(file) for file in sorted(INTEGRATION.rglob("test_*.py")) if words in file.read_text()
    ]


STAGES = (
    Stage(
        "unit and property",
        "they compute a little: as many at a time as there are cores",
        ["--numprocesses", "auto", "tests/unit", "tests/property"],
    ),
    Stage(
        "integration",
        "real processes: two files at a time",
        ["-v", *files_at_a_time(2), "-m", "not alone", "tests/integration"],
    ),
    Stage(
        "alone",
        "tests that compare moments: one at a time",
        ["-v", "-m", "alone", *files_with("mark.alone")],
    ),
    Stage(
        "oldest gunicorn and gevent",
        "streams rest on private details of both: both ends of their ranges are tested",
        [*files_at_a_time(2), "-m", "not alone", *oldest.TESTS],
        (sys.executable, "-m", "tests.oldest"),
    ),
    Stage(
        "real model and whole servers",
        "servers as users start them, and the default model: two files at a time",
        ["-v", *files_at_a_time(2), "tests/differential", "tests/e2e"],
    ),
)


@dataclass
class StageResult:
    """The result of one stage. `counts` is empty if pytest wrote no report.

    may_be_empty   whether arguments choose tests, of which a stage may have none
    """

    stage: Stage
    exit_code: int
    seconds: float
    may_be_empty: bool
    counts: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.exit_code == PASSED or (self.exit_code == NO_TEST_MATCHES and self.may_be_empty)

    def line(self) -> str:
        """Return one row of the summary."""
        counted = ", ".join(f"{count:,} {what}" for what, count in self.counts.items() if count)
        if not counted:
            counted = "no test matches" if self.is_good else f"pytest ended with {self.exit_code}"
        mark = "ok    " if self.is_good else "FAILED"
        return f"{mark}  {self.stage.name:<28}  {counted:<44}  {self.seconds:6.0f} s"


def read_report(file: Path) -> tuple[dict[str, int], list[str]]:
    """Return the counts and the failed tests of a JUnit report; both empty if there is none."""
    try:
        suites = ET.parse(file).getroot().findall("testsuite")
    except (OSError, ET.ParseError):  # pytest was killed, or refused its arguments
        return {}, []
    counts = {"failed": 0, "passed": 0, "skipped": 0}
    failed: list[str] = []
    for case in (case for suite in suites for case in suite.iter("testcase")):
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts, failed


def environment() -> dict[str, str]:
    """Return the environment of the tests, in which Python keeps the byte code of its imports.

    Without it, each of the hundreds of processes would compile every source file again.
    """
    return {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}


def run(stage: Stage, arguments: Sequence[str]) -> StageResult:
    print(f"\n== {stage.name}: {stage.why}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tidegate-tests-") as folder:
        report = Path(folder) / "report.xml"
        started = time.monotonic()
        options = [*OPTIONS, f"--junitxml={report}"]
        command = [*stage.program, *options, *stage.arguments, *arguments]
        exit_code = subprocess.run(command, env=environment()).returncode
        seconds = time.monotonic() - started
        return StageResult(stage, exit_code, seconds, bool(arguments), *read_report(report))


def summary(results: Sequence[StageResult]) -> str:
    """Return the table of all stages, and below it the tests that failed."""
    lines = ["", "== Summary", *(result.line() for result in results)]
    lines += [f"  failed: {name}" for result in results for name in result.failed]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    results = []
    for stage in STAGES:
        try:
            results.append(run(stage, arguments))
        except KeyboardInterrupt:
            print(summary(results), flush=True)
            return 130
    print(summary(results), flush=True)
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
