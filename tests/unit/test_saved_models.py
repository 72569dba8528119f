"""The models that clients have added, between two starts, and the reports of a download."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tools.models.catalogue import DEFAULT
from tools.models.download import FileProgress, NoDownload, NoSpace
from tools.models.records import PulledFile, PulledModel, write_record
from tools.processes.model_job import (
    REPORT_S,
    JobProgress,
    ProgressReporter,
    UnservableModel,
    error_of,
)
from tools.processes.saved_models import (
    SavedModel,
    operators_source,
    read_saved,
    saved_models_file,
    source_of,
    with_saved,
    write_saved,
)
from tools.processes.several_models import NamedModel

OWN = NamedModel("own", "/models/own", aliases=["first"])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a directory of downloads with the model owner/repo."""
    file = tmp_path / "weights"
    file.write_bytes(b"12345")
    record = PulledModel(
        name="owner/repo", kind="GGUF", path=str(file), files=[PulledFile(str(file), 5)]
    )
    write_record(tmp_path, record)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("owner/repo", "owner/repo"),
        ("hf.co/owner/repo:Q4_0", "owner/repo:Q4_0"),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf"),
        (DEFAULT, DEFAULT),
        ("llama3", ""),
        ("../x", ""),
        ("https://host/model.gguf#sha256=" + "0" * 64, ""),
    ],
)
def test_a_model_has_one_source_under_all_its_spellings(name: str, source: str) -> None:
    assert source_of(name) == source


def test_a_path_of_the_operator_has_no_source(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert operators_source("owner/repo") == "owner/repo"
    (home / "owner" / "repo").mkdir(parents=True)
    monkeypatch.chdir(home)
    assert operators_source("owner/repo") == ""


def test_a_saved_model_is_served_from_the_cache_at_its_first_request(home: Path) -> None:
    saved = [SavedModel(names=["a", "b"], source="owner/repo")]
    plan = with_saved([OWN], saved, home, {"mmproj": ""})
    own, added = plan.models
    assert own == OWN
    assert (added.name, added.aliases, added.model) == ("a", ["b"], str(home / "weights"))
    assert added.options == {"load": "first-use", "mmproj": ""}
    assert plan.added == ["a"]
    assert plan.own_names == {"own": frozenset(["own", "first"])}
    assert plan.sources == {"own": "", "a": "owner/repo"}


def test_names_of_the_command_line_precede_saved_ones(home: Path) -> None:
    saved = [
        SavedModel(names=["first", "b"], source="owner/repo"),
        SavedModel(names=["own", "c"], model="own"),
        SavedModel(names=["b"], model="own"),
    ]
    plan = with_saved([OWN], saved, home, {})
    assert [(each.name, list(each.aliases)) for each in plan.models] == [
        ("own", ["first", "c"]),
        ("b", []),
    ]


def test_a_model_that_is_gone_is_left_out(home: Path) -> None:
    (home / "weights").unlink()
    saved = [
        SavedModel(names=["a"], source="owner/repo"),
        SavedModel(names=["b"], source=DEFAULT),
        SavedModel(names=["c"], model="of another start"),
    ]
    assert list(with_saved([OWN], saved, home, {}).models) == [OWN]


def test_the_file_is_read_as_it_was_written_and_a_damaged_one_is_empty(home: Path) -> None:
    file = saved_models_file(home, 8000)
    saved = [SavedModel(names=["a"], source="owner/repo"), SavedModel(names=["b"], model="own")]
    assert read_saved(file) == []
    write_saved(file, msgspec.json.encode(saved))
    assert read_saved(file) == saved
    file.write_bytes(b"[{")
    assert read_saved(file) == []


def test_progress_is_reported_a_few_times_a_second_and_at_the_end_of_each_file() -> None:
    now = 100.0
    reports: list[JobProgress] = []
    reporter = ProgressReporter(reports.append, clock=lambda: now)
    for completed in (1, 2, 3):
        reporter.on_progress(FileProgress("sha256:" + "ab" * 32, 9, completed))
    now += 2 * REPORT_S
    for completed in (4, 5, 9):
        reporter.on_progress(FileProgress("sha256:" + "ab" * 32, 9, completed))
    reporter.on_progress(FileProgress("sha1:" + "cd" * 20, 7, 1))
    assert [(each.status, each.completed) for each in reports] == [
        ("pulling abababababab", 1),
        ("pulling abababababab", 4),
        ("pulling abababababab", 9),
        ("pulling cdcdcdcdcdcd", 1),
    ]


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (NoSpace("in /cache", needed=9 * 10**9, free=10**9), "disk_full", "9.0 GB needed, 1.0 GB"),
        (NoDownload("http://mirror", "unknown"), "model_not_found", "no model 'a/b'"),
        (NoDownload("http://mirror", "terms"), "invalid_request", "accepted its terms"),
        (NoDownload("http://mirror", "network"), "download_failed", "pull the model again"),
        (NoDownload("in /cache"), "download_failed", "the server's log"),
        (UnservableModel("it needs 9 GiB"), "invalid_request", "it needs 9 GiB"),
        (OSError("/cache: read-only"), "download_failed", "the server's log"),
    ],
)
def test_a_client_gets_the_cause_of_a_failure_without_paths_and_addresses(
    failure: Exception, code: str, words: str
) -> None:
    error = error_of(failure, "a/b")
    assert error.code == code
    assert words in error.message
    assert "/cache" not in error.message
    assert "http" not in error.message
