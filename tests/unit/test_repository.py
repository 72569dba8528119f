"""The files under version control: packages and files that people wrote, and no output of a run."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = {
    *("protocol", "gateway", "engine_core", "worker", "tools", "simulator", "tests"),
    *("docs", "deploy", ".ci"),
    *("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile"),
    *("setup.py", "setup.cfg", "tidegate.py", "pyproject.toml", "MANIFEST.in"),
    *(".gitignore", ".dockerignore"),
}
LARGEST_BYTES = 256 << 10
VENDOR = "gateway/web/static/vendor/"
"""Files of other projects, as they are published. Nobody reads or edits them here."""
NUM_LAWS = 19
NOT_BUILT: set[int] = set()


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return [Path(name) for name in listed.stdout.split("\0") if name]


def test_the_top_of_the_tree_is_known(tracked: list[Path]) -> None:
    assert {path.parts[0] for path in tracked} == TOP


def test_no_file_is_too_large_to_be_read(tracked: list[Path]) -> None:
    read = [path for path in tracked if not str(path).startswith(VENDOR)]
    sizes = {str(path): (ROOT / path).stat().st_size for path in read if (ROOT / path).exists()}
    assert {name: size for name, size in sizes.items() if size > LARGEST_BYTES} == {}


CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)


def test_no_class_name_stands_twice(tracked: list[Path]) -> None:
    """Only files with a class name that a text search finds twice are parsed, because parsing all
    files takes seconds."""
    texts = {
        path: (ROOT / path).read_text(encoding="utf-8")
        for path in tracked
        if path.suffix == ".py" and (ROOT / path).exists()
    }
    candidates = Counter(name for text in texts.values() for name in CLASS.findall(text))
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, text in texts.items():
        if any(candidates[name] > 1 for name in CLASS.findall(text)):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path}:{node.lineno}")
    assert len(candidates) > 100
    assert {name: at for name, at in places.items() if len(at) > 1} == {}


def test_builds_get_the_libraries_of_the_guide_that_the_extra_docs_names() -> None:
    setup = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (docs,) = (
        ast.literal_eval(node.value)
        for node in setup.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DOCS"
    )
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    assert set(build["requires"]) == {*docs, "setuptools>=77"}


def test_each_law_names_its_tests() -> None:
    """docs/contribute/laws.md has a row for each law, which names existing tests, and says which
    laws are not built."""
    page = (ROOT / "docs" / "contribute" / "laws.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, NUM_LAWS + 1))
    for number, _, tests in rows:
        names = re.findall(r"`(tests/[\w/*]+\.py)`", tests)
        assert names, f"law {number} names no test"
        missing = [name for name in names if not list(ROOT.glob(name))]
        assert not missing, f"law {number} names tests that do not exist: {missing}"
        assert ("not built" in tests) == (int(number) in NOT_BUILT), f"law {number}"


SOURCE = r"`([\w/]+\.(?:py|js|h|cpp))`"
FOLDER = r"`((?:protocol|gateway|engine_core|worker|tools|simulator|tests|docs|deploy)/[\w/]*)/`"


def test_documents_name_only_files_and_folders_that_exist(tracked: list[Path]) -> None:
    """A folder that exists on disk may be the empty rest of one that was moved."""
    ours = {f"/{path}" for path in tracked}
    folders = {str(folder) for path in tracked for folder in path.parents}
    named, missing = 0, set()
    for page in (path for path in tracked if path.suffix == ".md" and (ROOT / path).exists()):
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(SOURCE, text):
            named += 1
            if not any(each.endswith(f"/{name}") for each in ours):
                missing.add((str(page), name))
        for name in re.findall(FOLDER, text):
            named += 1
            if name not in folders:
                missing.add((str(page), f"{name}/"))
    assert named > 50
    assert missing == set()


WAITING = Path("tests/support/waiting.py")
"""The only file of tests that may sleep."""
PROGRAMS = ("tests/benchmarks/", "tests/torture/")
"""Folders of programs that measure a server over time, and may sleep."""
OWN_NAMES = ("self", "cls", "super", "os", "sys")
PRIVATE_PATH = re.compile(r"(protocol|gateway|engine_core|worker|tools|simulator)[\w.]*\._[a-z]\w*")
MAYBE_PRIVATE = re.compile(
    r"(?<!(?<![.\w])self)(?<!(?<![.\w])cls)(?<!(?<![.\w])os)(?<!(?<![.\w])sys)\.\s*_(?!_)"
    r"|^\s*from\s[^\n]*\bimport\b(?:\s*\([^)]*?|(?:\\\n|[^\n])*?)\b_",
    re.MULTILINE,
)
"""Every text with a private name has a match. Parsing all tests instead takes ten times as long."""


@pytest.fixture(scope="module")
def texts_of_tests(tracked: list[Path]) -> dict[Path, str]:
    return {
        path: (ROOT / path).read_text(encoding="utf-8")
        for path in tracked
        if path.parts[0] == "tests" and path.suffix == ".py" and (ROOT / path).exists()
    }


def lines_with(text: str, is_found: Callable[[ast.AST], bool]) -> list[int]:
    """Return the numbers of the lines with a node of Python's grammar that is found."""
    kinds = (ast.Attribute, ast.ImportFrom, ast.Constant, ast.Call)
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))
    return [node.lineno for node in nodes if is_found(node)]


def is_private_access(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name, value=holder):
            while isinstance(holder, ast.Call):  # super()
                holder = holder.func
            is_own = isinstance(holder, ast.Name) and holder.id in OWN_NAMES
            return name.startswith("_") and not name.startswith("__") and not is_own
        case ast.ImportFrom(names=names):
            return any(name.name.startswith("_") for name in names)
        case ast.Constant(value=str(text)):
            return PRIVATE_PATH.fullmatch(text) is not None
    return False


def private_lines(text: str) -> list[int]:
    return lines_with(text, is_private_access) if MAYBE_PRIVATE.search(text) else []


def test_no_test_uses_a_private_name(texts_of_tests: dict[Path, str]) -> None:
    assert len(texts_of_tests) > 500
    found = {path: private_lines(text) for path, text in texts_of_tests.items()}
    assert {str(path): lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "engine._slots",
        "call()._slots",
        "myself._slots",
        "engine.self._slots",
        "self._engine._slots",
        "(engine\n    ._slots)",
        "(engine.\n    _slots)",
        "from engine_core.engine import _Slots",
        "from engine_core.engine import Engine, _Slots as Slots",
        "from engine_core.engine import (\n    Engine,\n    _Slots,\n)",
        "from engine_core.engine import Engine, \\\n    _Slots",
        "if True:\n    from engine_core.engine import _Slots",
        "'engine_core.engine._slots'",
    ],
)
def test_each_kind_of_private_name_is_found(text: str) -> None:
    assert private_lines(text)


@pytest.mark.parametrize("text", ["self._slots", "super()._slots", "a.__dict__", "import _thread"])
def test_own_names_are_not_private(text: str) -> None:
    assert private_lines(text) == []


def is_sleep(node: ast.AST) -> bool:
    """Return whether `node` calls `sleep` with a duration. `sleep(0)` takes no time."""
    match node:
        case ast.Call(func=ast.Attribute(attr="sleep"), args=[ast.Constant(value=0)]):
            return False
        case ast.Call(func=ast.Attribute(attr="sleep")):
            return True
    return False


def test_no_test_waits_for_a_duration(texts_of_tests: dict[Path, str]) -> None:
    outside = (str(WAITING), *PROGRAMS)
    found = {
        str(path): lines_with(text, is_sleep)
        for path, text in texts_of_tests.items()
        if "sleep" in text and not str(path).startswith(outside)
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_wait_for_a_duration_is_found() -> None:
    assert lines_with("time.sleep(0)\ntime.sleep(0.1)\nsleep(s=1)", is_sleep) == [2]
