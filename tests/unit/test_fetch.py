"""What the progress bar of a fetch reads from a folder that pip is still tidying."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.fetch import _largest_file


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


def _removing(doomed: Path, scandir: Callable[..., Any]) -> Callable[..., Any]:
    """os.scandir, with pip removing `doomed` just before we look into it."""

    def looked(path: Any = ".") -> Any:
        if path in (str(doomed), doomed):
            (doomed / "wheel").unlink()
            doomed.rmdir()
        return scandir(path)

    return looked
