"""A program of `make torture` runs in a network of its own, or says why it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.torture import own_network


def test_a_missing_program_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert own_network.why_not() == "unshare is not installed"


def test_only_a_command_inside_has_the_public_address_and_the_name_server() -> None:
    if why := own_network.why_not():
        pytest.skip(why)
    names = Path("/etc/resolv.conf")
    if not names.exists():
        pytest.skip("this machine has no /etc/resolv.conf")
    program = (
        "from tests.torture import own_network as own;"
        f"print(own.is_inside(), open({str(names)!r}).read().split()[1] == own.NAME_SERVER)"
    )
    enter = (
        "import sys; from tests.torture import own_network as own;"
        f"own.enter([sys.executable, '-c', {program!r}])"
    )
    before = names.read_text()
    done = subprocess.run(
        [sys.executable, "-c", enter], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout == "True True\n"
    assert not own_network.is_inside()
    assert names.read_text() == before
