"""The command that installs more of Tidegate works from where this installation came."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

from protocol.process.installation import install_command, reinstall_command
from protocol.process.packages import HOME
from tools.processes.start_checks import EXTRAS


def test_in_a_clone_the_command_names_the_clone() -> None:
    words = shlex.split(install_command("hub"))
    assert words[:2] == [sys.executable, "-m"] or words[:2] == ["uv", "pip"]
    assert words[-2:] == ["-e", f"{HOME}[hub]"]
    assert shlex.split(reinstall_command())[-1] == f"{HOME}[all]"


def test_an_environment_of_uv_needs_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    expected = f"uv pip install --python {sys.executable} -e '{HOME}[hub]'"
    assert install_command("hub") == expected


class Installed:
    """A distribution that was installed from `url`."""

    def __init__(self, url: str) -> None:
        self._record = json.dumps({"url": url, "dir_info": {}})

    def read_text(self, name: str) -> str:
        return self._record if name == "direct_url.json" else ""


def test_a_wheel_names_the_folder_it_was_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a clone"
    folder.mkdir()
    for url, expected in [
        (folder.as_uri(), f"'{folder}[cuda]'"),
        ((tmp_path / "gone").as_uri(), "-e '.[cuda]' in a clone of Tidegate"),
        ("https://example.com/tidegate.whl", "-e '.[cuda]' in a clone of Tidegate"),
    ]:
        monkeypatch.setattr(importlib.metadata, "distribution", lambda _, u=url: Installed(u))
        assert install_command("cuda", tmp_path).partition(" install ")[2] == expected


def test_the_extras_exist() -> None:
    text = (HOME / "setup.py").read_text() + (HOME / "setup.cfg").read_text()
    for extra in {*EXTRAS.values(), "hub", "cuda", "otel", "nixl", "transformers"}:
        assert f"{extra} =" in text or f'"{extra}"' in text
