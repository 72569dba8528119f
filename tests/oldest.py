"""Runs tests with the oldest gunicorn and gevent that setup.py allows.

Streams are written directly to the client's socket, which rests on private details of both
libraries (`gateway/http/client_socket.py`). All other tests run with the newest versions that
setup.py allows. The oldest ones are installed, once, into a virtual environment inside the main
one, which supplies everything else. `make test-oldest` runs TESTS. Arguments can name other tests:

    python -m tests.oldest tests/unit/test_sse.py
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path(sys.prefix) / "oldest"
LIBRARIES = ("gevent", "gunicorn")
TESTS = (
    "tests/unit/test_sse.py",
    "tests/unit/test_client_socket.py",
    "tests/integration/test_gateway_streams.py",
    "tests/integration/test_connections.py",
    "tests/integration/test_slow_readers.py",
    "tests/integration/test_gateway_lifecycle.py::"
    "test_a_drain_finishes_streams_and_accepts_nothing_new",
)


def oldest_versions(setup: str) -> dict[str, str]:
    """Return the lower bound of each library's range in the text of setup.py."""
    found = {name: re.search(rf'"{name}>=([\w.]+),<', setup) for name in LIBRARIES}
    return {name: match[1] for name, match in found.items() if match is not None}


def environment_with(versions: Mapping[str, str]) -> Path:
    """Return the Python of an environment with these versions. Create the environment if it is
    missing or has other versions."""
    python = FOLDER / "bin" / "python"
    stamp = FOLDER / "versions.json"
    wanted = json.dumps([sys.version, versions])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    pins = [f"{name}=={version}" for name, version in versions.items()]
    print(f"== Installing {', '.join(pins)} into {FOLDER}; once", flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    venv.create(FOLDER, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, *pins], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(FOLDER)}))
    main = sysconfig.get_path("purelib")  # searched after `own`
    (own / "main.pth").write_text(f"import site; site.addsitedir({main!r})\n")
    stamp.write_text(wanted)
    return python


def versions_in(python: Path) -> dict[str, str]:
    """Return the version of each library that this Python imports."""
    shown = ", ".join(f"{name}.__version__" for name in LIBRARIES)
    code = f"import {', '.join(LIBRARIES)}; print({shown})"
    ran = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return dict(zip(LIBRARIES, ran.stdout.split(), strict=True))


def main(arguments: Sequence[str]) -> int:
    versions = oldest_versions((ROOT / "setup.py").read_text())
    python = environment_with(versions)
    if (imported := versions_in(python)) != versions:
        print(f"{FOLDER} has {imported}, not {versions}; delete it", file=sys.stderr)
        return 1
    names_a_test = any((ROOT / each.partition("::")[0]).exists() for each in arguments)
    tests = () if names_a_test else TESTS
    return subprocess.run([str(python), "-m", "pytest", *arguments, *tests], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
