"""Runs a program in a network of its own, whose addresses, ports and names are those of a test.

    python -m tests.torture.own_network COMMAND [ARGUMENT ...]

The command gets Linux namespaces for its network and its mounts. Its machine has an address that
counts as public, PUBLIC, and addresses that do not, PRIVATE, and sends nothing to any other
machine. Its resolver asks a name server on 127.0.0.1, which the command must run. Without the right
to make namespaces, which many containers lack, `why_not` has the reason.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.support.processes import ROOT

PUBLIC = "93.184.216.34"
PRIVATE = ("169.254.169.254", "10.0.0.1")
NAME_SERVER = "127.0.0.1"
SILENCE_S = 20
"""How long a name server may be silent before it counts as broken."""
_FILES = {
    "/etc/resolv.conf": f"nameserver {NAME_SERVER}\noptions attempts:1 timeout:{SILENCE_S}\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
"""Files of the resolver, and the text that the command finds in them."""
_PROGRAMS = ("unshare", "ip", "mount")


def is_inside() -> bool:
    """Return whether this process is in such a network."""
    with socket.socket() as probe:
        try:
            probe.bind((PUBLIC, 0))
        except OSError:
            return False
        return True


def why_not() -> str:
    """Return why no command can be run in such a network; "" if one can."""
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    done = subprocess.run(_unshared(["true"]), check=False, capture_output=True, text=True)
    if not done.returncode:
        return ""
    return done.stderr.strip().rpartition("\n")[2] or f"unshare ended with {done.returncode}"


def enter(command: Sequence[str]) -> NoReturn:
    """Replace this process by a command in a network of its own."""
    arguments = _unshared(command)
    os.execvp(arguments[0], arguments)


def _unshared(command: Sequence[str]) -> list[str]:
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    inside = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-P", "-m", "tests.torture.own_network"]
    return ["unshare", "--net", "--mount", *user, *inside, *command]


def _set_up() -> None:
    """Make the network, in namespaces that belong to this process."""
    _run("ip", "link", "set", "lo", "up")
    for address in (PUBLIC, *PRIVATE):
        _run("ip", "address", "add", f"{address}/32", "dev", "lo")
    with tempfile.TemporaryDirectory() as folder:  # what is mounted remains
        for path, text in _FILES.items():
            if Path(path).exists():
                file = Path(folder) / Path(path).name
                file.write_text(text)
                _run("mount", "--bind", str(file), path)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    _set_up()
    os.execvp(sys.argv[1], sys.argv[1:])
