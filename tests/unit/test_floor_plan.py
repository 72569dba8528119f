"""The star: a room imports itself, `protocol`, the standard library and its own libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Program

ROOT = Path(__file__).parents[2]

LIBRARIES = {
    "protocol": {"msgspec", "zmq"},
    "gateway": {
        *("msgspec", "zmq", "gevent", "flask", "jinja2", "tokenizers"),
        *("prometheus_client", "gunicorn", "werkzeug", "markupsafe", "opentelemetry"),
    },
    "engine_core": {"msgspec", "zmq", "llguidance"},
    "worker": {"msgspec", "zmq", "numpy", "torch", "safetensors", "gguf"},
    "tools": {"msgspec", "tqdm"},
}
ROOMS = list(LIBRARIES)
UNSAFE = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}
"""Formats that run code while they are read."""

UNSAFE_NAMES = {"recv_pyobj", "send_pyobj", "allow_pickle", "Unpickler"}
UNSAFE_CALLS = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load")}
"""The same, by way of a library."""

FLASK_IN = {"app.py", "body.py", "openapi_routes.py", "respond.py", "routes.py", "run.py", "sse.py"}
"""In the gateway, only these know that HTTP is spoken by Flask."""

PURE = ("prompt", "text", "formats")
"""In the gateway, these turn values into values: no socket, no greenlet, no request object."""

HEAVY = {"torch", "transformers", "numpy", "gguf", "safetensors"}
LIGHT_ENTRANCES = {
    "gateway.app": HEAVY,
    "gateway.limited.__main__": HEAVY | {"flask", "gevent", "gunicorn", "zmq"},
    "engine_core.process": HEAVY | {"flask", "gevent", "jinja2", "tokenizers", "llguidance"},
    "protocol.client": HEAVY | {"flask", "gevent", "jinja2", "tokenizers"},
    "tools.__main__": HEAVY | {"flask", "gevent", "jinja2", "tokenizers", "gunicorn"},
    "worker.startup.card": {"torch", "transformers", "gguf"},
    "worker.startup.assembly": {"transformers", "gguf"},
}
"""What people and processes enter by -> what must not have been loaded then, however indirectly."""


def files(room: str) -> Iterator[Path]:
    found = sorted((ROOT / room).rglob("*.py"))
    assert found, f"room {room} is empty"
    yield from found


def imported_by(path: Path) -> set[str]:
    """The top-level packages that a file imports, anywhere in it."""
    own = path.relative_to(ROOT).parts[0]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(own if node.level else (node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_itself_protocol_and_its_own_libraries(room: str) -> None:
    allowed = {room, "protocol", "__future__"} | LIBRARIES[room] | sys.stdlib_module_names
    for path in files(room):
        strangers = imported_by(path) - allowed
        assert not strangers, f"{path.relative_to(ROOT)} imports {sorted(strangers)}"


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_reads_a_format_that_runs_code(room: str) -> None:
    for path in files(room):
        found = imported_by(path) & UNSAFE
        assert not found, f"{path.relative_to(ROOT)} imports {sorted(found)}"


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_calls_what_reads_or_writes_such_a_format(room: str) -> None:
    for path in files(room):
        node: Any
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            assert name not in UNSAFE_NAMES, f"{path.relative_to(ROOT)}:{node.lineno} uses {name}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                call = (node.value.id, node.attr)
                assert call not in UNSAFE_CALLS, f"{path.relative_to(ROOT)}:{node.lineno} {call}"


def test_a_program_under_test_that_unpickles_ends() -> None:
    """Every test that starts our processes therefore also tests that none of them does."""
    code = "import pickle; print('begun', flush=True); pickle.loads(pickle.dumps(print))"
    with Program(["-c", code]) as program:
        assert program.end() == 97
        assert program.out == ["begun"]


def test_in_the_gateway_only_its_doors_know_flask() -> None:
    for path in files("gateway"):
        if path.name not in FLASK_IN:
            assert "flask" not in imported_by(path), f"{path.relative_to(ROOT)} imports flask"


@pytest.mark.parametrize("folder", PURE)
def test_what_the_gateway_makes_of_text_knows_no_socket_and_no_greenlet(folder: str) -> None:
    for path in files(f"gateway/{folder}"):
        found = imported_by(path) & {"flask", "gevent", "zmq", "socket", "threading"}
        assert not found, f"{path.relative_to(ROOT)} imports {sorted(found)}"


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_says_what_its_law_is(room: str) -> None:
    for path in files(room):
        law = ast.get_docstring(ast.parse(path.read_text()))
        assert law, f"{path.relative_to(ROOT)} has no docstring"


@pytest.mark.parametrize("entrance", LIGHT_ENTRANCES)
def test_a_light_process_loads_no_heavy_library(entrance: str) -> None:
    code = f"import sys, {entrance}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert not set(ran.stdout.split()) & LIGHT_ENTRANCES[entrance]


def test_our_rooms_win_over_folders_of_the_same_name(tmp_path: Path) -> None:
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise SystemExit('the wrong room')")
    code = "import " + ", ".join(ROOMS)
    ran = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True)
    assert ran.returncode == 0, ran.stderr
