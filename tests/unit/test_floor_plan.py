"""The laws of the floor plan: what each package imports, and how large its parts may be. A message
of a failed test gives the reason of its law."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cache
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
        *("PIL", "numpy"),  # in the sandbox process that reads images
    },
    "engine_core": {"msgspec", "zmq", "llguidance"},
    "worker": {
        *("msgspec", "zmq", "numpy", "torch", "safetensors", "gguf", "transformers"),
        "triton",
    },
    "tools": {"argcomplete", "msgspec", "tqdm", "huggingface_hub", "httpx2", "ray"},
    "simulator": {"msgspec"},
}
ROOMS = list(LIBRARIES)
ROOMS_OF_OTHERS = {"simulator": {"engine_core", "gateway"}}
"""Rooms that a room imports besides itself and `protocol`. No room imports the simulator."""
SIMULATED = {"gateway.fleet.routing", "gateway.engine.refusal_cache"}
"""The only modules of the gateway that the simulator imports. They are pure."""
UNSAFE = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}
"""Formats that run code while they are read."""

UNSAFE_NAMES = {"recv_pyobj", "send_pyobj", "allow_pickle", "Unpickler"}
UNSAFE_CALLS = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load")}
"""Functions of libraries that read or write such a format, and the option that permits it."""

FLASK_IN = (
    "gateway/app.py",
    "gateway/http/*.py",
    "gateway/api/server/adapters.py",
    "gateway/api/server/admin.py",
    "gateway/api/server/library.py",
    "gateway/api/server/web.py",
    "gateway/api/*/*routes.py",
    "gateway/offline/process.py",
)
"""The only files of the gateway that may import Flask."""

RAY_IN = ("tools/cluster/actor.py", "tools/cluster/attempt.py", "tools/cluster/connection.py")
"""The only files that may import Ray, besides the launcher's loop, which imports them."""

PURE = ("prompt", "text", "formats")
"""Folders of the gateway without sockets, threads, greenlets or request objects."""

LEVELS: dict[str, Sequence[set[str]]] = {
    "protocol": (
        {"client", "async_client", "offline"},
        {"sdk", "shared", "tools"},
        {"config", "worker"},
        {"engine", "process"},
        {"wire", "machine"},
    ),
    "gateway": (
        {"app", "gunicorn_conf", "rejected_requests", "startup_checks", "offline"},
        {"api"},
        {"service", "model_host", "model_preparation"},
        {"store", "observe"},
        {"generation", "context", "model_use", "served_model"},
        {"prompt", "formats", "sandbox", "images"},
        {"fleet"},
        {"engine"},
        {"text", "http", "auth", "thread_pool", "web", "gateway_start", "gevent_patch"},
    ),
    "engine_core": (
        {"__main__"},
        {"process"},
        {"loop"},
        {"startup"},
        {"journal"},
        {"workers", "saved_adapters", "result_sender"},
        {"engine"},
        {"endings", "status", "invariants"},
        {"parts"},
        {"admission", "history"},
        {"schedule"},
        {"encode", "kv"},
        {"adapters", "blocks", "images", "policy"},
        {"speculation"},
        {"requests"},
        {"grammar"},
        {"connections", "profiling"},
    ),
    "worker": (
        {"__main__", "join", "list_families", "list_encoder_families"},
        {"process"},
        {"service", "benchmark", "quantize"},
        {"startup"},
        {"loading"},
        {"step", "draft", "encoders"},
        {"models"},
        {"lora"},
        {"vision"},
        {"batch", "sampling"},
        {"attention", "kernels", "layers"},
        {"kv", "checkpoint"},
        {"spec", "slots"},
        {"device"},
        {"errors"},
    ),
    "tools": (
        {"offline"},
        {"commands"},
        {"__main__", "cluster", "completion"},
        {"bench", "batches", "chat", "config_file"},
        {"models", "libraries", "processes"},
        {"http", "top", "flags", "option_groups", "paths", "torch_build"},
        {"terminal", "failure", "doctor_findings", "other_servers", "agents", "sizes"},
    ),
    "simulator": (
        {"__main__"},
        {"run"},
        {"processes"},
        {"cluster"},
        {"machine"},
        {"light", "measured"},
        {"replica"},
        {"gateway", "steps", "workload", "light_cache", "figures"},
        {"config_names", "hardware", "requests", "trace"},
    ),
}
"""Room -> its modules and folders in levels, from the entrances down. Each may import its own level
and the levels below. So a reader can learn a room from below: what a level needs, she knows
already. And what two levels share has one place, which is below both."""

BROAD_EXCEPTS = {
    "worker/vision/service.py": "ends the request of the image that failed with the cause",
    # A process's loop, or the end of a process.
    "engine_core/loop.py": "sends every client the cause, then fails",
    "engine_core/process.py": "reports the cause to the parent",
    "engine_core/journal/__main__.py": "prints what the replayed engine raised",
    "gateway/sandbox/__main__.py": "templates are foreign code: they may raise anything",
    "gateway/sandbox/process.py": "a greenlet that is killed leaves a reply behind",
    "gateway/images/decode.py": "decoders raise anything for damaged files",
    "gateway/store/runs.py": "the flusher goes on after a failure",
    "worker/process.py": "reports the cause to the engine",
    "worker/kv/report_queue.py": "raises a thread's exception in the loop",
    "worker/lora/service.py": "a damaged file may make any library fail, in a thread",
    # The boundary of a request.
    "gateway/api/batches/runner.py": "a batch that fails is continued later",
    "gateway/api/render/replay.py": "a forged state may make any parser fail",
    "gateway/api/responses/stream.py": "the client must not wait forever",
    "gateway/generation/group.py": "a parser's failure ends its own request only",
    # Foreign code, mostly in a thread.
    "engine_core/grammar/service.py": "llguidance may panic, which is no Exception",
    "engine_core/grammar/source.py": "the converter of GBNF raises anything",
    "gateway/text/tokenizer.py": "tokenizers raises bare Exceptions, and may panic",
    "gateway/text/trial.py": "tokenizers may panic",
    "gateway/thread_pool.py": "the waiter raises what its thread raised",
    "tools/cluster/attempt.py": "a thread of the launcher, whose loop must know that it has ended",
    "worker/models/hf.py": "transformers raises anything for a config or a file",
    "worker/models/hf_own_cache.py": "transformers raises anything for a config or a file",
    "worker/kv/movers/nixl.py": "NIXL's errors have no common base class",
}
"""Files that may catch every exception, and why. Cleanup uses `with` or ExitStack instead."""

ENVIRONMENT = {
    # Configuration.
    "protocol/config/gateway.py": "the config of a gateway process",
    "protocol/process/lifeline.py": "the pipes to the parent process",
    "protocol/process/start_gate.py": "the pipe from the supervisor",
    "protocol/wire/sockets.py": "the directory of the sockets",
    "tools/models/fetch.py": "the cache directory, and the environment of pip",
    "tools/terminal.py": "whether to print colours",
    # Commands of the command line.
    "tools/commands/bench.py": "the API key",
    "tools/commands/chat.py": "the API key",
    "tools/commands/config.py": "the API key",
    "tools/commands/run.py": "the API key",
    "tools/commands/run_batch.py": "the API key",
    "tools/commands/serve.py": "the API key, and the environment of the gateway",
    "tools/commands/worker.py": "the variables of torchrun",
    # The environment of a child process.
    "tools/commands/launch.py": "the API key, and the environment of an agent",
    "engine_core/workers/process.py": "a worker's",
    "protocol/process/malloc.py": "a worker's, for glibc",
    "protocol/sdk/offline.py": "that of the processes of an LLM",
    "gateway/sandbox/process.py": "the sandbox process's",
    "tools/processes/child_environment.py": "that of all processes of a server",
    # Variables of libraries, which read them when they are imported.
    "gateway/gunicorn_conf.py": "prometheus_client's directory",
    "gateway/observe/metrics.py": "prometheus_client's directory",
    "worker/device/environment.py": "the defaults of OpenMP and oneDNN",
}
"""Files besides `__main__` that may read or set environment variables, and what for."""

LONG_FILE_LINES, MAX_FILE_LINES = 500, 1000
SOURCE_SUFFIXES = {".py", ".js", ".css", ".cpp", ".h"}
GUIDE = ROOT / "gateway" / "web" / "guide"
"""The built documentation (`make docs`), which no one edits."""
LONG_FILES = {
    "engine_core/engine.py": "the whole step, from the plan to the outputs, in one place",
    "engine_core/loop.py": "one loop, whose turns are read from top to bottom",
}
"""Files with more than LONG_FILE_LINES lines, and why they stay whole. No file has more than
MAX_FILE_LINES."""

MAX_BODY_LINES = 60
LONG_FUNCTIONS = {
    "worker/kernels/triton/attention.py:prefill": "a Triton kernel, whose parts share their tiles",
}
"""Functions with more than MAX_BODY_LINES lines, and why they stay whole. The signature and the
docstring do not count, because they list options."""

HEAVY = {"torch", "transformers", "numpy", "gguf", "safetensors"}
LIGHT_ENTRANCES = {
    "gateway.app": HEAVY,
    "gateway.sandbox.__main__": HEAVY | {"flask", "gevent", "gunicorn", "zmq"},
    "engine_core.loop": HEAVY | {"flask", "gevent", "jinja2", "tokenizers", "llguidance"},
    "protocol.client": HEAVY | {"flask", "gevent", "jinja2", "tokenizers"},
    "protocol.offline": HEAVY | {"flask", "gevent", "jinja2", "tokenizers", "tqdm"},
    "tools.__main__": HEAVY
    | {"flask", "gevent", "jinja2", "tokenizers", "gunicorn", "huggingface_hub", "httpx2"}
    | {"argcomplete"},
    "simulator.__main__": HEAVY | {"flask", "gevent", "jinja2", "tokenizers", "gunicorn"},
    "tools.cluster.__main__": HEAVY | {"flask", "gevent", "jinja2", "tokenizers", "ray"},
    "tools.completion": HEAVY | {"flask", "gevent", "zmq", "http", "huggingface_hub"},
    "tools.commands.run": HEAVY | {"flask", "gevent", "jinja2", "tokenizers", "huggingface_hub"},
    "tools.commands.serve": HEAVY | {"flask", "gevent", "jinja2", "tokenizers", "ray"},
    "worker.startup.card": {"torch", "transformers", "gguf"},
    "worker.startup.memory_facts": HEAVY,
}
"""Module -> libraries that importing the module must not load, not even indirectly."""


def files(room: str) -> Iterator[Path]:
    found = sorted((ROOT / room).rglob("*.py"))
    assert found, f"room {room} is empty"
    yield from found


def differing(found: Collection[str], listed: Collection[str]) -> str:
    """Return the names that only one of two collections has, with what is wrong with them."""
    new, gone = sorted({*found} - {*listed}), sorted({*listed} - {*found})
    wrong = [f"{name} is not listed" for name in new] + [f"{name} is not found" for name in gone]
    return "; ".join(wrong)


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all syntax nodes of a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imported_by(path: Path) -> set[str]:
    """Return the top-level packages that a file imports anywhere."""
    own = path.relative_to(ROOT).parts[0]
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(own if node.level else (node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_itself_protocol_and_its_own_libraries(room: str) -> None:
    allowed = {room, "protocol", "__future__"} | LIBRARIES[room] | sys.stdlib_module_names
    allowed |= ROOMS_OF_OTHERS.get(room, set())
    for path in files(room):
        strangers = imported_by(path) - allowed
        assert not strangers, (
            f"{path.relative_to(ROOT)} imports {sorted(strangers)}: {room} knows only protocol and "
            "its own libraries, so each process can be replaced, and starts with what it needs"
        )


def test_the_simulator_imports_only_pure_modules_of_the_gateway() -> None:
    found = {
        node.module
        for path in files("simulator")
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gateway")
    }
    assert found == SIMULATED
    for module in SIMULATED:
        path = ROOT / f"{module.replace('.', '/')}.py"
        assert imported_by(path) <= {"protocol", "__future__"} | sys.stdlib_module_names


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_reads_a_format_that_runs_code(room: str) -> None:
    for path in files(room):
        found = imported_by(path) & UNSAFE
        assert not found, f"{path.relative_to(ROOT)} imports {sorted(found)}"


@pytest.mark.parametrize("room", ROOMS)
def test_no_package_calls_functions_of_unsafe_formats(room: str) -> None:
    for path in files(room):
        node: Any
        for node in nodes_of(path):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            assert name not in UNSAFE_NAMES, f"{path.relative_to(ROOT)}:{node.lineno} uses {name}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                call = (node.value.id, node.attr)
                assert call not in UNSAFE_CALLS, f"{path.relative_to(ROOT)}:{node.lineno} {call}"


def test_a_program_under_test_that_unpickles_ends() -> None:
    """All programs under test run with this check. So every such test also checks that nothing is
    unpickled."""
    code = "import pickle; print('begun', flush=True); pickle.loads(pickle.dumps(print))"
    with Program(["-c", code]) as program:
        assert program.end() == 97
        assert program.out == ["begun"]


def test_a_program_under_test_that_imports_ray_may_unpickle() -> None:
    """Ray pickles what its processes send each other. Only the launcher and actors import it."""
    code = "import pickle, sys; sys.modules['ray'] = sys; pickle.loads(pickle.dumps(print))"
    with Program(["-c", code]) as program:
        assert program.end() == 0


def test_only_some_modules_of_the_gateway_import_flask() -> None:
    for path in files("gateway"):
        if not any(path.relative_to(ROOT).match(pattern) for pattern in FLASK_IN):
            assert "flask" not in imported_by(path), (
                f"{path.relative_to(ROOT)} imports flask: all but the routes work without HTTP"
            )


def test_only_the_launcher_and_its_actors_import_ray() -> None:
    importing = {str(p.relative_to(ROOT)) for p in files("tools") if "ray" in imported_by(p)}
    assert importing == {*RAY_IN, "tools/cluster/launcher.py"}


def test_no_view_takes_state_from_flasks_globals() -> None:
    for path in files("gateway"):
        nodes = nodes_of(path)
        imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "flask"]
        names = {alias.name for node in imports for alias in node.names}
        names |= {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        assert not names & {"g", "flask.g"}, (
            f"{path.relative_to(ROOT)} reads flask.g: a view's state is in its arguments, so that "
            "it can be followed and tested"
        )


@pytest.mark.parametrize("folder", PURE)
def test_text_folders_of_the_gateway_import_no_sockets_and_no_greenlets(folder: str) -> None:
    for path in files(f"gateway/{folder}"):
        found = imported_by(path) & {"flask", "gevent", "zmq", "socket", "threading"}
        assert not found, (
            f"{path.relative_to(ROOT)} imports {sorted(found)}: {folder} is pure, so that every "
            "cut and every conversation can be tried without a process"
        )


def parts_imported_by(path: Path, room: str) -> set[str]:
    """Return the modules and folders of its own room that a file imports anywhere."""
    modules = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, (
                f"{path} imports relatively: then a move changes its meaning, and a search for a "
                "module's users misses it"
            )
            module = node.module or ""
            names = [alias.name for alias in node.names] if module == room else [""]
            modules |= {f"{module}.{name}" for name in names}
    return {each.split(".")[1] for each in modules if each.startswith(f"{room}.")}


def part_of(path: Path, room: str) -> str:
    """Return the module or folder of the room that a file is, or is in."""
    return path.relative_to(ROOT / room).parts[0].removesuffix(".py")


def level_of(part: str, levels: Sequence[set[str]]) -> int:
    """Return the place of a part's level, counted from the entrances."""
    return next(level for level, parts in enumerate(levels) if part in parts)


@pytest.mark.parametrize("room", LEVELS)
def test_every_part_of_a_room_has_one_level(room: str) -> None:
    found = {part_of(path, room) for path in files(room)} - {"__init__"}
    listed = [part for parts in LEVELS[room] for part in parts]
    assert sorted(listed) == sorted(found), (
        f"{differing(found, listed)}: each part of {room} has one level, so that a reader knows "
        "what she must have read before"
    )


@pytest.mark.parametrize("room", LEVELS)
def test_imports_go_down_only(room: str) -> None:
    for path in files(room):
        own = part_of(path, room)
        if own != "__init__":
            level = level_of(own, LEVELS[room])
            imported = parts_imported_by(path, room)
            higher = {part for part in imported if level_of(part, LEVELS[room]) < level}
            assert not higher, (
                f"{path.relative_to(ROOT)} imports {sorted(higher)}, on a higher level than {own}. "
                "A level is learned without those above it: move what both need further down"
            )


def test_an_import_of_a_higher_level_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "worker" / "kv" / "cache.py"
    file.parent.mkdir(parents=True)
    file.write_text("from worker.device.staging import upload\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    test_imports_go_down_only("worker")
    file = file.with_name("blocks.py")
    file.write_text("def late():\n    import worker.startup.assembly\n")
    with pytest.raises(AssertionError, match=r"blocks\.py imports .'startup'.*is learned"):
        test_imports_go_down_only("worker")


def catches_everything(node: ast.AST) -> bool:
    """Return whether `node` is an `except` or a `suppress` of every exception."""
    if isinstance(node, ast.ExceptHandler):
        kinds = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
    elif isinstance(node, ast.Call):
        if "suppress" not in (getattr(node.func, "attr", ""), getattr(node.func, "id", "")):
            return False
        kinds = list(node.args)
    else:
        return False
    return any(
        kind is None or getattr(kind, "id", "") in ("Exception", "BaseException") for kind in kinds
    )


def test_only_listed_files_catch_every_exception() -> None:
    found = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in files(room)
        if any(map(catches_everything, nodes_of(path)))
    }
    assert found == set(BROAD_EXCEPTS), (
        f"{differing(found, BROAD_EXCEPTS)}: who catches every exception hides faults of ours. "
        "Name the exceptions; at a boundary where that is impossible, BROAD_EXCEPTS says why"
    )


def test_only_listed_files_read_the_environment() -> None:
    """Other files get the values of environment variables as arguments."""
    names = {"environ", "environb", "getenv", "putenv"}
    found = set()
    node: Any
    for path in (path for room in ROOMS for path in files(room)):
        for node in nodes_of(path):
            is_use = isinstance(node, ast.Attribute) and node.attr in names
            if is_use and getattr(node.value, "id", "") == "os":
                found.add(str(path.relative_to(ROOT)))
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                imported = names & {alias.name for alias in node.names}
                assert not imported, f"{path.relative_to(ROOT)} hides that it uses {imported}"
    found = {name for name in found if not name.endswith("__main__.py")}
    assert found == set(ENVIRONMENT), (
        f"{differing(found, ENVIRONMENT)}: a variable that is read deep inside cannot be seen from "
        "the options, nor set by a test. Entrances read it, and pass its value on"
    )


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_has_a_docstring(room: str) -> None:
    for path in files(room):
        module = nodes_of(path)[0]
        assert isinstance(module, ast.Module)
        law = ast.get_docstring(module)
        assert law, (
            f"{path.relative_to(ROOT)} has no docstring: its first sentence says what it is for"
        )


def test_only_listed_files_are_long() -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in SOURCE_SUFFIXES and GUIDE not in path.parents
    }
    long = {name for name, number in lines.items() if number > LONG_FILE_LINES}
    assert long == set(LONG_FILES), (
        f"{differing(long, LONG_FILES)}: a file of more than {LONG_FILE_LINES} lines is hard to "
        "find one's way in. If it has a part with a name of its own, that part gets a file. If it "
        "is one concept, it stays whole, and LONG_FILES says why"
    )
    assert max(lines.values()) <= MAX_FILE_LINES, (
        f"{max(lines, key=lambda name: lines[name])} has more than {MAX_FILE_LINES} lines, which "
        "no reader holds in mind: it is more than one concept"
    )


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function's body after its docstring."""
    has_docstring = ast.get_docstring(function) is not None
    first = function.body[1 if has_docstring and len(function.body) > 1 else 0]
    return (function.end_lineno or 0) - first.lineno + 1


def test_only_listed_functions_are_long() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.name}"
        for room in ROOMS
        for path in files(room)
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and body_lines(node) > MAX_BODY_LINES
    }
    assert long == set(LONG_FUNCTIONS), (
        f"{differing(long, LONG_FUNCTIONS)}: a body of more than {MAX_BODY_LINES} lines is not "
        "read at one glance. Its steps get names of their own, or LONG_FUNCTIONS says why not"
    )


@pytest.mark.parametrize("entrance", LIGHT_ENTRANCES)
def test_a_light_process_loads_no_heavy_library(entrance: str) -> None:
    code = f"import sys, {entrance}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert not set(ran.stdout.split()) & LIGHT_ENTRANCES[entrance]


def test_an_engine_process_starts_its_worker_before_it_imports_the_engine() -> None:
    code = "import sys, engine_core.process; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    loaded = set(ran.stdout.split())
    assert "engine_core.workers.link" in loaded
    assert not loaded & {"engine_core.loop", "engine_core.engine", "engine_core.parts"}


def test_a_worker_loads_only_the_part_of_torch_that_steps_use() -> None:
    code = """if True:
        import sys
        from worker.device.postponed import TORCH_SHAPES, TORCH_UNUSED, load_postponed, postpone
        postpone({TORCH_SHAPES: (), **dict.fromkeys(TORCH_UNUSED, ())})
        import worker.startup.assembly
        assert not sys.modules.keys() & {"transformers", "gguf", "triton", "torch._refs"}
        packages = {name.rpartition(".")[0] for name in sys.modules}
        assert not packages & set(TORCH_UNUSED)
        load_postponed(TORCH_SHAPES)
        import torch
        columns, scales = (torch.zeros(shape, device="meta") for shape in [(3, 2), (2,)])
        assert torch.linalg.householder_product(columns, scales).shape == (3, 2)
        assert torch.distributions.Normal(2.0, 1.0).mean == 2
        from torch.utils.data import TensorDataset
        assert len(TensorDataset(columns)) == 3
        for name in TORCH_UNUSED:
            load_postponed(name)
            assert any(each.startswith(f"{name}.") for each in sys.modules), name
        """
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_our_rooms_win_over_folders_of_the_same_name(tmp_path: Path) -> None:
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise SystemExit('the wrong room')")
    code = "import " + ", ".join(ROOMS)
    ran = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True)
    assert ran.returncode == 0, ran.stderr
