"""Runs the whole suite in stages, all of them even if one fails, and prints a summary.

`make test` runs this; arguments go to every stage's pytest:

    python -m tests.stages -k stream

Tests of real processes often wait: for a start, a drain or a deadline. So more of them run at a
time than there are cores. Stages whose tests only compute run in the background at the same time,
with a lower priority, and use the time that the others leave. Their output is printed when they
have ended. Each is split into shares, and each share is a pytest of its own, which imports only its
own files. Processes of pytest-xdist would each import all files, and send every result.

A test of real processes may fail because the machine was busy. So a few such tests that have failed
run again when everything else has ended. Those that pass then are unsteady: the summary names them,
because they are to be mended, but they do not fail the suite.

To find unsteady tests, run the whole suite several times while other programs use the cores:

    python -m tests.stages --repeat 3 --busy 2

At the end this lists the tests that failed or were unsteady in any run. It fails if there are any.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from protocol.process.process_state import read_all_stats
from tests import oldest

PYTEST = (sys.executable, "-m", "pytest")
OPTIONS = ("-ra", "--durations=10", "--maxfail=30")
"""If something is broken that most tests need, such as the kernels, a stage ends early instead of
waiting for each server that does not start. ARGS="--maxfail 1000" shows the other failures too."""
PASSED, NO_TEST_MATCHES = 0, 5  # pytest's exit codes
TESTS = Path(__file__).parent
INTEGRATION = TESTS / "integration"
NICENESS = 10
"""Niceness of stages that only compute. If both need a core, a process of another stage gets nine
times as much CPU time as one of theirs. Beside other programs that use the cores, they would get
almost none, so then all stages have the same niceness."""
BACKGROUND = ("--timeout", "900")
"""Options of these stages, whose tests may wait long for a core."""
CORES = os.cpu_count() or 1
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Environment of tests that run beside others: their threads would wait for one another."""
WAITING = min(4, CORES + 1)
"""Number of files with tests of real processes that run at a time. One more than there are cores,
because these tests often wait; not more than four, because each may start servers with a model."""
BUSY_LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A program that uses a core until its parent ends."""
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
"""Signals that each Python ignores. `subprocess` restores them in the programs that it starts."""


ROOT = Path(__file__).parents[1]
MAX_AGAIN = 4
"""Most failed tests of a stage that run again. If there are more, a busy machine is not why."""


@dataclass(frozen=True)
class Stage:
    """One run of pytest.

    in_background   whether it runs beside other stages, at most `CORES` background stages at a time
    niceness        niceness of its processes
    alone           whether it waits until all background stages have ended
    again           whether tests that have failed run again at the end
    """

    name: str
    why: str
    arguments: Sequence[str]
    program: Sequence[str] = PYTEST
    in_background: bool = False
    niceness: int = 0
    alone: bool = False
    again: bool = False


def files_at_a_time(count: int) -> list[str]:
    """Return the options that run `count` files at a time, in their order, each in one process."""
    return ["--numprocesses", str(count), "--dist", "loadfile", "--no-loadscope-reorder"]


def files_with(words: str) -> list[str]:
    """Return the files of integration tests that contain `words`. To select tests, pytest alone
    would import all files."""
    return [
        str(file) for file in sorted(INTEGRATION.rglob("test_*.py")) if words in file.read_text()
    ]


def in_shares(name: str, why: str, count: int, folders: Sequence[str]) -> list[Stage]:
    """Return background stages that together run all files of tests in these folders of `tests`,
    each file once. Large and small files are dealt out in turn, so that the shares take about the
    same time."""
    files = [file for folder in folders for file in (TESTS / folder).rglob("test_*.py")]
    files.sort(key=lambda file: (-file.stat().st_size, file))
    return [
        Stage(
            f"{name}, {number + 1} of {count}",
            why,
            [*BACKGROUND, *(str(file) for file in sorted(files[number::count]))],
            in_background=True,
            niceness=NICENESS,
        )
        for number in range(count)
    ]


STAGES = (
    *in_shares(
        "unit and property",
        "they compute a little: as many at a time as there are cores",
        CORES,
        ("unit", "property"),
    ),
    *in_shares("differential", "they compute a lot: two at a time", 2, ("differential",)),
    Stage(
        "oldest gunicorn and gevent",
        "streams rest on private details of both: both ends of their ranges are tested",
        [*files_at_a_time(2), "-m", "not alone", *oldest.TESTS],
        (sys.executable, "-m", "tests.oldest"),
        in_background=True,
        again=True,
    ),
    Stage(
        "integration and end to end",
        "real processes, and servers as users start them: more files at a time than cores",
        ["-v", *files_at_a_time(WAITING), "-m", "not alone", "tests/integration", "tests/e2e"],
        again=True,
    ),
    Stage(
        "alone",
        "tests that compare moments: one at a time",
        ["-v", "-m", "alone", *files_with("mark.alone")],
        alone=True,
    ),
)


@dataclass
class StageResult:
    """The result of one stage. `counts` is empty if pytest wrote no report.

    cpu_seconds    CPU time of its processes. On two cores, a suite cannot end before half their sum
    may_be_empty   whether the stage may have no tests, because arguments choose some tests
    unsteady       tests that failed, and passed when they ran again
    """

    stage: Stage
    exit_code: int
    seconds: float
    cpu_seconds: float
    may_be_empty: bool
    counts: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    unsteady: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        if self.unsteady and not self.failed:
            return True
        return self.exit_code == PASSED or (self.exit_code == NO_TEST_MATCHES and self.may_be_empty)

    def line(self) -> str:
        """Return one row of the summary."""
        counted = ", ".join(f"{count:,} {what}" for what, count in self.counts.items() if count)
        if not counted:
            counted = "no test matches" if self.is_good else f"pytest ended with {self.exit_code}"
        mark = "ok    " if self.is_good else "FAILED"
        times = f"{self.seconds:7.1f} s  {self.cpu_seconds:7.1f} s of CPU"
        return f"{mark}  {self.stage.name:<28}  {counted:<44}  {times}"


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


def node_id(name: str) -> str | None:
    """Return pytest's id of a failed test of a report; None if it is not a function of a file."""
    module, _, function = name.partition("::")
    file = Path(*module.split(".")).with_suffix(".py")
    return f"{file}::{function}" if (ROOT / file).is_file() else None


def environment(stage: Stage) -> dict[str, str]:
    """Return the environment of a stage's tests, in which Python writes byte code files.

    Without these files, each of the hundreds of processes would compile every source file again.
    """
    ours = {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}
    return ours | (ONE_THREAD if stage.in_background else {})


def ignore(number: int, frame: object) -> None:
    """Handle a signal by doing nothing. Unlike SIG_IGN, a handler does not apply to the programs
    that a process starts: their signals have the default action."""


@contextmanager
def default_signals_for_children() -> Iterator[None]:
    """Let no program inherit that signals are ignored, while we continue to ignore them.

    `nohup` ignores SIGHUP, and a shell without job control ignores SIGINT and SIGQUIT of what it
    runs in the background. The servers under test would ignore them as well.
    """
    ignored = [
        each
        for each in signal.valid_signals() - IGNORED_BY_PYTHON
        if signal.getsignal(each) is signal.SIG_IGN
    ]
    for each in ignored:
        signal.signal(each, ignore)
    try:
        yield
    finally:
        for each in ignored:
            signal.signal(each, signal.SIG_IGN)


def is_detached() -> bool:
    """Return whether the terminal's signals are ignored. Stages then run in sessions of their own,
    which these signals do not reach."""
    return ignore in (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGINT))


def interrupt_detached() -> None:
    """Interrupt the stages that Ctrl-C has not reached."""
    if is_detached():
        for pid, stat in read_all_stats().items():
            if stat.parent == os.getpid():
                os.kill(pid, signal.SIGINT)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run `count` programs that only use the cores."""
    with ExitStack() as stack:
        for _ in range(count):
            loop = subprocess.Popen([sys.executable, "-c", BUSY_LOOP], stderr=subprocess.DEVNULL)
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        yield


def run(stage: Stage, arguments: Sequence[str], output: IO[bytes] | None = None) -> StageResult:
    """Run one stage. Its output goes to `output`, or by default to our own."""
    with tempfile.TemporaryDirectory(prefix="tidegate-tests-") as folder:
        report = Path(folder) / "report.xml"
        started = time.monotonic()
        options = [*OPTIONS, f"--junitxml={report}"]
        command = [*stage.program, *options, *stage.arguments, *arguments]
        with subprocess.Popen(
            ["nice", "-n", str(stage.niceness), *command],
            env=environment(stage),
            stdin=None if output is None else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=is_detached(),
        ) as process:
            exit_code, cpu_seconds = wait(process)
        seconds = time.monotonic() - started
        return StageResult(
            stage, exit_code, seconds, cpu_seconds, bool(arguments), *read_report(report)
        )


def wait(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Wait until a program ends. Return its exit code, and the CPU time in seconds of it and of all
    programs below it that were waited for. If Ctrl-C ends the wait, kill the program."""
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


def run_again(result: StageResult) -> None:
    """Run the failed tests of a stage again, if they are few, and note those that pass."""
    ids = [node_id(name) for name in result.failed]
    chosen = [each for each in ids if each is not None]
    if not chosen or len(chosen) < len(ids) or len(ids) > MAX_AGAIN:
        return
    again = Stage(
        f"{result.stage.name}, again",
        "what has failed, now alone",
        ["-v", *chosen],
        result.stage.program,
    )
    heading(again)
    second = run(again, ())
    if second.exit_code != PASSED or second.counts.get("passed") != len(chosen):
        return
    result.unsteady, result.failed = result.failed, []
    result.counts = {**result.counts, "failed": 0, "unsteady": len(result.unsteady)}


def heading(stage: Stage) -> None:
    """Print the name of a stage, whose output follows."""
    print(f"\n== {stage.name}: {stage.why}", flush=True)


class BackgroundStages:
    """Runs as many stages at a time as there are cores, beside the stages that `main` runs."""

    def __init__(self, chosen: Sequence[Stage], arguments: Sequence[str]) -> None:
        self._pool = ThreadPoolExecutor(max_workers=CORES)
        self._runs = deque(self._pool.submit(run_captured, stage, arguments) for stage in chosen)

    def ended(self, *, all_of_them: bool) -> list[StageResult]:
        """Print the output of each stage that has ended since the last call, and return the
        results. If `all_of_them`, wait until each stage has ended."""
        results = []
        while self._runs and (all_of_them or self._runs[0].done()):
            result, output = self._runs[0].result()
            self._runs.popleft()
            heading(result.stage)
            print(output, end="", flush=True)
            results.append(result)
        return results

    def close(self) -> None:
        """Start no further stage, but do not wait for the one that runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def run_captured(stage: Stage, arguments: Sequence[str]) -> tuple[StageResult, str]:
    """Run one stage. Return its result and its output."""
    with tempfile.TemporaryFile() as output:
        result = run(stage, arguments, output)
        output.seek(0)
        return result, output.read().decode(errors="replace")


def summary(results: Sequence[StageResult]) -> str:
    """Return the table of all stages, and below it the tests that failed or are unsteady."""
    lines = ["", "== Summary", *(result.line() for result in results)]
    lines += [
        f"  unsteady: {name} (failed, and passed when it ran again alone)"
        for result in results
        for name in result.unsteady
    ]
    lines += [f"  failed: {name}" for result in results for name in result.failed]
    return "\n".join(lines)


def over_runs(runs: Sequence[Sequence[StageResult]]) -> str:
    """Return a list of the tests that failed or were unsteady, with the numbers of their runs."""
    found: dict[str, list[str]] = {}
    for number, results in enumerate(runs, 1):
        for result in results:
            for name in result.failed:
                found.setdefault(name, []).append(f"failed in run {number}")
            for name in result.unsteady:
                found.setdefault(name, []).append(f"unsteady in run {number}")
            if not result.is_good and not result.failed:
                found.setdefault(result.stage.name, []).append(f"no result in run {number}")
    lines = [f"  {name}: {', '.join(when)}" for name, when in sorted(found.items())]
    return "\n".join(
        ["", f"== All runs ({len(runs)})", *(lines or ["  every test passed in each"])]
    )


def run_suite(arguments: Sequence[str], *, is_busy: bool) -> list[StageResult]:
    """Run all stages and print the summary, also if Ctrl-C ends them. `is_busy`: other programs use
    the cores."""
    results: list[StageResult] = []
    stages = [replace(stage, niceness=0) for stage in STAGES] if is_busy else STAGES
    background = BackgroundStages([stage for stage in stages if stage.in_background], arguments)
    try:
        for stage in stages:
            if not stage.in_background:
                results += background.ended(all_of_them=stage.alone)
                heading(stage)
                results.append(run(stage, arguments))
        results += background.ended(all_of_them=True)
        for result in results:
            if result.stage.again:
                run_again(result)
    except KeyboardInterrupt:
        interrupt_detached()
        raise
    finally:
        background.close()
        results.sort(key=lambda result: stages.index(result.stage))
        print(summary(results), flush=True)
    return results


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stages",
        description="Run the whole suite. Other arguments go to the pytest of every stage.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="run the suite N times, list the tests that failed or were unsteady, and fail if there"
        " are any",
    )
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        metavar="N",
        help="run N programs beside the suite that only use the cores",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    options, for_pytest = argument_parser().parse_known_args(arguments)
    runs: list[list[StageResult]] = []
    try:
        with default_signals_for_children(), busy_loops(options.busy):
            for _ in range(options.repeat):
                runs.append(run_suite(for_pytest, is_busy=options.busy > 0))
    except KeyboardInterrupt:
        return 130
    finally:
        if options.repeat > 1:
            print(over_runs(runs), flush=True)
    results = [result for run in runs for result in run]
    is_steady = options.repeat == 1 or not any(result.unsteady for result in results)
    return 0 if is_steady and all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
