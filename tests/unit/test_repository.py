"""What is under version control: rooms and files that people wrote, and nothing that a run left."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = {
    *("protocol", "gateway", "engine_core", "worker", "tools", "tests", "docs", "deploy", ".ci"),
    *("README.md", "SECURITY.md", "LICENSE", "Makefile", "setup.py", "setup.cfg", "tidegate.py"),
    *("pyproject.toml", "MANIFEST.in", ".gitignore"),
}
LARGEST_BYTES = 256 << 10


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
    sizes = {str(path): (ROOT / path).stat().st_size for path in tracked if (ROOT / path).exists()}
    assert {name: size for name, size in sizes.items() if size > LARGEST_BYTES} == {}


def test_no_class_name_stands_twice(tracked: list[Path]) -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in (ROOT / path for path in tracked if path.suffix == ".py"):
        if path.exists():
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: at for name, at in places.items() if len(at) > 1} == {}
