"""A distribution whose files are mixed into our packages is found and named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from protocol.rooms import HOME, ROOMS, PackageProblem, check_rooms
from tools import findings
from tools.findings import Verdict

FILES = {f"{room}/__init__.py": f'"""Our {room}."""\n' for room in ROOMS}
FILES |= {"tools/__main__.py": "print('it runs')\n\ndef main():\n    return 0\n"}
OTHERS = {"tools/__init__.py": "raise RuntimeError('not ours')\n", "tools/hammer.py": "\n"}
RUN = "import sys, tidegate; sys.exit(tidegate.main())"


def install(site: Path, name: str, files: Mapping[str, str]) -> None:
    """Write files and their list, as an installer does; what is there is replaced."""
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    info = site / f"{name}.dist-info"
    info.mkdir()
    rows = [f"{path},sha256=x,{len(text.encode())}" for path, text in files.items()]
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages with ours in it, small."""
    site = tmp_path / "site"
    own = {f"protocol/{name}.py": (HOME / f"protocol/{name}.py").read_text() for name in ["rooms"]}
    own |= {"tidegate.py": (HOME / "tidegate.py").read_text()}
    install(site, "tidegate-0.1.0", FILES | own)
    return site


def tidegate(site: Path) -> subprocess.CompletedProcess[str]:
    """The command, as it is installed there."""
    code = f"import sys; sys.path[:0] = [{str(site)!r}]; {RUN}"
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)


def uninstall(site: Path, name: str, files: Mapping[str, str]) -> None:
    for path in files:
        (site / path).unlink()
    shutil.rmtree(site / f"{name}.dist-info")


def test_this_installation_is_whole() -> None:
    assert check_rooms() == check_rooms(thorough=True) == []
    assert findings.packages([]).verdict is Verdict.OK


def test_an_installation_alone_is_whole(site: Path) -> None:
    done = tidegate(site)
    assert (done.returncode, done.stdout, done.stderr) == (0, "it runs\n", "")


def test_a_package_that_replaces_a_file_of_ours_is_named_before_it_is_imported(site: Path) -> None:
    install(site, "tools-9.1", OTHERS)
    done = tidegate(site)
    assert done.returncode == 1
    replaced, foreign = done.stderr.splitlines()
    assert replaced.startswith("tidegate: tools/__init__.py was replaced by tools 9.1; reinstall")
    assert foreign.startswith("tidegate: tools/hammer.py belongs to tools 9.1; removing that may")
    assert "environment of its own: pipx install" in replaced


def test_what_its_removal_has_taken_with_it_is_named(site: Path) -> None:
    install(site, "tools-9.1", OTHERS)
    uninstall(site, "tools-9.1", OTHERS)
    done = tidegate(site)
    assert done.returncode == 1
    assert done.stderr.startswith("tidegate: the package tools has no __init__.py: a part of")


def test_files_that_are_only_added_do_not_keep_it_from_starting(site: Path) -> None:
    install(site, "worker-2.0", {"worker/strange.py": ""})
    done = tidegate(site)
    assert (done.returncode, done.stdout) == (0, "it runs\n")
    assert "worker/strange.py belongs to worker 2.0" in done.stderr


def test_a_package_that_is_found_before_ours_is_named(site: Path, tmp_path: Path) -> None:
    install(tmp_path / "first", "gateway-3.0", {"gateway/__init__.py": ""})
    path = [str(tmp_path / "first"), str(site)]
    code = f"import sys; sys.path[:0] = {path!r}; {RUN}"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    said = f"the package gateway is {tmp_path / 'first' / 'gateway'} of gateway 3.0, which hides"
    assert said in done.stderr


EDITABLE = """
from importlib.machinery import PathFinder

class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{site!r}]) if path is None else None

sys.meta_path.append(Editable)
"""
"""Packages are found in `site` after all of sys.path, as setuptools' editable installs have it."""


@pytest.mark.parametrize("file", ["gateway/routes.py", "gateway.py"])
def test_a_folder_or_a_module_that_hides_an_editable_install_is_named(
    site: Path, tmp_path: Path, file: str
) -> None:
    first = tmp_path / "first"
    install(first, "gateway-3.0", {file: ""})
    code = f"import sys; sys.path.insert(0, {str(first)!r})\n{EDITABLE.format(site=str(site))}\n"
    command = [sys.executable, "-I", "-S", "-c", code + RUN]
    done = subprocess.run(command, capture_output=True, text=True)
    found = first / file.removesuffix("/routes.py")
    assert done.returncode == 1
    assert f"the package gateway is {found} of gateway 3.0, which hides" in done.stderr
    assert f"in {site / 'gateway'}" in done.stderr


def test_a_file_that_somebody_edited_is_told_by_the_doctor_alone(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.rooms._misplaced", lambda room, home: "")
    (site / "protocol/rooms.py").write_text("# mine\n")
    assert check_rooms(site) == []
    (trouble,) = check_rooms(site, thorough=True)
    said = "protocol/rooms.py was changed after the installation"
    assert trouble == PackageProblem(said, is_fatal=False)
    assert findings.packages([trouble]).verdict is Verdict.DOUBT


def test_a_file_that_is_gone_is_fatal(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.rooms._misplaced", lambda room, home: "")
    (site / "tools/__main__.py").unlink()
    assert check_rooms(site) == [PackageProblem(f"tools/__main__.py is missing from {site}")]
    assert findings.packages(check_rooms(site)).verdict is Verdict.BAD
