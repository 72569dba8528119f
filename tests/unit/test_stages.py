"""The suite's stages: all of them run, and the summary has a row for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import stages
from tests.stages import Stage, main, read_report

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
    assert rows[3].endswith("test_bad::test_bad")


@pytest.mark.usefixtures("three")
def test_arguments_go_to_every_stage_and_a_stage_without_a_match_is_good(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["-k", "test_good"]) == 0
    assert capfd.readouterr().out.count("no test matches") == 2


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
