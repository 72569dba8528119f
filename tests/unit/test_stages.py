"""The suite's stages: all of them run, and the summary has a row for each."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.process.process_state import read_all_stats
from tests import stages
from tests.stages import Stage, in_shares, main, read_report

FOUND = {
    "good": "def test_good(): pass\n",
    "bad": "def test_bad(): assert False\n",
    "skipped": "import pytest\n@pytest.mark.skip(reason='no such machine')\ndef test_it(): pass\n",
}


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the suite's stages by three with one test each. The first one fails."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second each
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    made = []
    for name in ("bad", "good", "skipped"):
        file = tmp_path / f"test_{name}.py"
        file.write_text(FOUND[name])
        made.append(Stage(name, "a test", ["-q", "-c", str(tmp_path / "pytest.ini"), str(file)]))
    monkeypatch.setattr(stages, "STAGES", made)


@pytest.mark.usefixtures("three")
def test_every_stage_runs_although_the_first_one_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    rows = capfd.readouterr().out.split("== Summary\n")[1].splitlines()
    assert [row.split()[:4] for row in rows[:3]] == [
        ["FAILED", "bad", "1", "failed"],
        ["ok", "good", "1", "passed"],
        ["ok", "skipped", "1", "skipped"],
    ]
    assert all(float(row.split()[-4]) > 0 for row in rows[:3])  # seconds of CPU
    assert rows[3].endswith("test_bad::test_bad")


@pytest.mark.usefixtures("three")
def test_arguments_go_to_every_stage_and_a_stage_without_a_match_is_good(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["-k", "test_good"]) == 0
    assert capfd.readouterr().out.count("no test matches") == 2


def only_stage(folder: Path, text: str) -> list[Stage]:
    """Return one stage, with one file of tests in a folder of its own."""
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = " + str(Path.cwd()))
    file = folder / "test_it.py"
    file.write_text(text)
    options = ["-q", "-c", str(folder / "pytest.ini"), str(file)]
    return [Stage("it", "a test", options)]


ONCE = """
from pathlib import Path

def test_once():
    file = Path(__file__).with_name("seen")
    had_run = file.exists()
    file.touch()
    assert had_run

def test_never():
    assert {never}
"""


@pytest.mark.parametrize("never", [True, False])
def test_a_test_that_passes_alone_is_unsteady_and_one_that_fails_again_has_failed(
    never: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(ONCE.format(never=never))
    monkeypatch.setattr(stages, "STAGES", [Stage("it", "a test", ["test_it.py"], again=True)])
    assert main([]) == (0 if never else 1)
    rows = capfd.readouterr().out.split("== Summary\n")[1].splitlines()
    if never:
        assert rows[0].startswith("ok ")
        assert "1 passed, 1 unsteady" in rows[0]
        assert "unsteady: test_it::test_once" in rows[1]
    else:
        assert rows[0].startswith("FAILED")
        assert [row.split()[0] for row in rows[1:]] == ["failed:", "failed:"]


def test_many_failures_do_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test_it(n): assert False\n"
    )
    monkeypatch.setattr(stages, "STAGES", [Stage("it", "a test", ["test_it.py"], again=True)])
    assert main([]) == 1
    assert "again" not in capfd.readouterr().out


EVERY_OTHER_TIME = """
from pathlib import Path

def test_it():
    file = Path(__file__).with_name("seen")
    had_run = file.exists()
    file.unlink() if had_run else file.touch()
    assert had_run
"""


def test_a_test_that_was_unsteady_in_one_of_several_runs_is_listed_and_fails_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(EVERY_OTHER_TIME)
    monkeypatch.setattr(stages, "STAGES", [Stage("it", "a test", ["test_it.py"], again=True)])
    assert main(["--repeat", "2"]) == 1
    first, _, all_runs = capfd.readouterr().out.partition("== All runs (2)\n")
    assert first.count("== Summary") == 2
    assert all_runs == "  test_it::test_it: unsteady in run 1, unsteady in run 2\n"


def test_several_runs_of_a_steady_suite_list_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(stages, "STAGES", only_stage(tmp_path, FOUND["good"]))
    assert main(["--repeat", "2"]) == 0
    assert capfd.readouterr().out.endswith("== All runs (2)\n  every test passed in each\n")


SIGNALS = """
from pathlib import Path

def test_defaults():
    lines = Path("/proc/self/status").read_text().splitlines()
    (ignored,) = (line.split()[1] for line in lines if line.startswith("SigIgn"))
    assert int(ignored, 16) & {mask} == 0
"""
TERMINAL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


@pytest.fixture
def _ignored_signals() -> Iterator[None]:
    """Ignore the signals of the terminal, as `nohup` and shells without job control do."""
    before = {each: signal.signal(each, signal.SIG_IGN) for each in TERMINAL}
    yield
    assert {signal.getsignal(each) for each in TERMINAL} == {signal.SIG_IGN}
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("_ignored_signals")
def test_no_stage_inherits_that_signals_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    mask = sum(1 << each - 1 for each in TERMINAL)
    monkeypatch.setattr(stages, "STAGES", only_stage(tmp_path, SIGNALS.format(mask=mask)))
    assert main([]) == 0


HANGUP = """
import os, signal

def test_hangup():
    assert os.getsid(0) == os.getpid()
    os.kill(os.getppid(), signal.SIGHUP)
"""


@pytest.mark.usefixtures("_ignored_signals")
def test_a_hangup_of_the_terminal_ends_neither_the_runner_nor_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hangup reaches the processes of the terminal's session only, and the runner ignores it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(stages, "STAGES", only_stage(tmp_path, HANGUP))
    assert main([]) == 0


LOOPS = """
import os
from protocol.process.process_state import read_all_stats, read_command_line

def test_two_loops():
    siblings = [pid for pid, stat in read_all_stats().items() if stat.parent == os.getppid()]
    loops = [pid for pid in siblings if "while" in " ".join(read_command_line(pid))]
    assert len(loops) == 2
"""


def test_busy_loops_run_beside_the_stages_and_end_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(stages, "STAGES", only_stage(tmp_path, LOOPS))
    before = own_children()
    assert main(["--busy", "2"]) == 0
    assert own_children() == before


def own_children() -> set[int]:
    return {pid for pid, stat in read_all_stats().items() if stat.parent == os.getpid()}


MEETING = """
from pathlib import Path
from tests.support.waiting import eventually

def test_{name}():
    own, other = Path(__file__).with_name("{name}"), Path(__file__).with_name("{other}")
    own.touch()
    assert eventually(other.exists)
"""


def test_a_background_stage_runs_beside_others_and_before_a_stage_that_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(stages, "STAGES", list(meeting_stages(tmp_path)))
    assert main(["-p", "no:cacheprovider"]) == 0
    out, summary = capfd.readouterr().out.split("== Summary\n")
    assert [row.split()[1] for row in summary.splitlines()] == ["first", "second", "last"]
    headings = [line for line in out.splitlines() if line.startswith("== ")]
    assert headings == ["== second: a test", "== first: a test", "== last: a test"]


def test_background_stages_run_at_the_same_time_as_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(stages, "CORES", 2)
    first, second, last = meeting_stages(tmp_path)
    meeting = [first, replace(second, in_background=True), last]
    monkeypatch.setattr(stages, "STAGES", meeting)
    assert main(["-p", "no:cacheprovider"]) == 0
    headings = [line for line in capfd.readouterr().out.splitlines() if line.startswith("== ")]
    assert headings == [f"== {each.name}: a test" for each in meeting] + ["== Summary"]


@pytest.mark.parametrize("count", [1, 3])
def test_each_file_is_in_one_share(count: int) -> None:
    shares = in_shares("it", "a test", count, ("unit", "property"))
    found = [{each for each in share.arguments if each.endswith(".py")} for share in shares]
    files = [
        file for kind in ("unit", "property") for file in Path("tests", kind).rglob("test_*.py")
    ]
    assert sum(map(len, found)) == len(files)
    assert {Path(each).name for each in set().union(*found)} == {file.name for file in files}
    sizes = [sum(Path(each).stat().st_size for each in share) for share in found]
    assert max(sizes) < 1.05 * min(sizes)


def meeting_stages(folder: Path) -> Iterator[Stage]:
    """Yield two stages whose tests wait for one another, and one that runs after both."""
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = " + str(Path.cwd()))
    texts = {
        "first": MEETING.format(name="first", other="second"),
        "second": MEETING.format(name="second", other="first"),
        "last": "def test_last(): pass",
    }
    for name, text in texts.items():
        file = folder / f"test_{name}.py"
        file.write_text(text)
        arguments = ["-q", "-c", str(folder / "pytest.ini"), str(file)]
        yield Stage(name, "a test", arguments, in_background=name == "first", alone=name == "last")


def test_a_stage_without_a_report_has_no_counts(tmp_path: Path) -> None:
    (tmp_path / "cut.xml").write_text("<testsuites><testsuite")
    assert read_report(tmp_path / "cut.xml") == ({}, [])
    assert read_report(tmp_path / "none.xml") == ({}, [])


def test_a_stage_without_tests_fails_unless_arguments_choose_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the tests of a stage are renamed, the stage must not pass without any."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_none.py").touch()
    options = ["-q", "-c", str(tmp_path / "pytest.ini"), str(tmp_path / "test_none.py")]
    monkeypatch.setattr(stages, "STAGES", [Stage("empty", "a test", options)])
    assert main([]) == 1
