"""`make serve` says in plain words what is missing, before it installs anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = """#!/bin/sh
case "$1" in --version) echo 'Python 3.9.2' ;; *) exit 1 ;; esac
"""
"""A Python that fails every check of its version."""
WITHOUT_VENV = f"""#!/bin/sh
case "$2" in venv) echo 'ensurepip is not available'; exit 1 ;; esac
exec {sys.executable} "$@"
"""
"""A Python as Debian installs it, without the package for virtual environments."""


def make(folder: Path, python: str, path: Path | None = None) -> list[str]:
    """Run `make serve`, which must fail, and return its lines of text except those of make itself.

    folder   where the virtual environment would be
    path     a directory that is the whole PATH; None: that of this process
    """
    program = shutil.which("make")
    if program is None:
        pytest.skip("needs make")
    done = subprocess.run(
        [program, f"VENV={folder / 'venv'}", f"PYTHON={python}", "serve"],
        cwd=ROOT,
        env=None if path is None else {"PATH": str(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert not (folder / "venv").exists()
    return [line for line in done.stdout.splitlines() if not line.startswith("make")]


def program(file: Path, text: str) -> str:
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


def commands(folder: Path, *names: str) -> Path:
    """Return a directory with links to these commands of the system only."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def test_an_old_python_is_refused_and_a_newer_one_is_named(tmp_path: Path) -> None:
    path = commands(tmp_path / "bin", "sh", "uname")
    (path / "python3.12").symlink_to(sys.executable)
    old = program(tmp_path / "old", OLD)
    assert make(tmp_path, old, path) == [
        f"Tidegate needs Python 3.11 or newer; {old} is Python 3.9.2.",
        "There is a newer one here: make PYTHON=python3.12 serve",
    ]


def test_without_a_new_python_make_says_what_to_install(tmp_path: Path) -> None:
    path = commands(tmp_path / "bin", "sh", "uname")
    assert make(tmp_path, "python3", path) == [
        "Tidegate needs Python 3.11 or newer; python3 is not installed.",
        "Install one, such as the packages python3.12 and python3.12-venv of Ubuntu.",
        "Then name it: make PYTHON=python3.12 serve",
    ]


def test_without_venv_make_names_the_package(tmp_path: Path) -> None:
    python = program(tmp_path / "python", WITHOUT_VENV)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert make(tmp_path, python)[-3:] == [
        "ensurepip is not available",
        "The virtual environment could not be created; the reason is above.",
        f"On Debian and Ubuntu, its package may be missing: sudo apt install python{version}-venv",
    ]
