"""A postponed module is executed at the first use of one of its names, and only once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from worker.device.postponed import load_postponed, postpone, postpone_torch_parts

NAME, DEPENDENT = "postponed_example", "dependent_of_postponed_example"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return a postponed module, imported but not yet executed. `sys.executions` counts its
    executions."""
    source = "import sys\nsys.executions += 1\nanswer = 42\n"
    (tmp_path / f"{NAME}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "executions", 0, raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    postpone({NAME: [DEPENDENT]})
    (tmp_path / f"{DEPENDENT}.py").write_text("import sys\nseen = sys.executions\n")
    yield importlib.import_module(NAME)
    for name in (NAME, DEPENDENT):
        sys.modules.pop(name, None)


def executions() -> int:
    return vars(sys)["executions"]  # type: ignore[no-any-return]


def test_an_import_and_a_look_at_its_file_do_not_execute_a_module(module: ModuleType) -> None:
    assert module.__file__
    assert not hasattr(module, "__path__")
    assert executions() == 0


def test_the_use_of_a_name_executes_a_module_once(module: ModuleType) -> None:
    assert module.answer == 42
    assert not hasattr(module, "question")
    assert executions() == 1


def test_a_module_can_be_loaded_before_its_use(module: ModuleType) -> None:
    load_postponed(NAME)
    load_postponed(NAME)
    assert executions() == 1
    assert vars(module)["answer"] == 42


def test_a_module_is_executed_before_its_dependents(module: ModuleType) -> None:
    assert executions() == 0
    assert importlib.import_module(DEPENDENT).seen == 1
    assert module.answer == 42


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of a postponed package, imported but not yet executed, with a module."""
    package = tmp_path / "postponed_package"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\nsys.executions += 1\n")
    (package / "part.py").write_text("import sys\nseen = sys.executions\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "executions", 0, raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    postpone({package.name: ()})
    importlib.import_module(package.name)
    yield package.name
    for name in (package.name, f"{package.name}.part"):
        sys.modules.pop(name, None)


def test_a_package_is_executed_before_a_module_in_it(package: str) -> None:
    assert executions() == 0
    assert importlib.import_module(f"{package}.part").seen == 1


def test_loading_a_module_that_was_not_postponed_does_nothing() -> None:
    load_postponed("json")
    load_postponed("a_module_that_is_not_imported")


@pytest.mark.parametrize(
    ("version", "is_gpu", "is_postponed"),
    [("2.13.0+cpu", False, True), ("2.13.0+cu130", True, False), ("2.12.1", False, False)],
)
def test_only_a_checked_version_of_torch_without_gpus_is_imported_in_parts(
    monkeypatch: pytest.MonkeyPatch, version: str, is_gpu: bool, is_postponed: bool
) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = len(sys.meta_path)
    postpone_torch_parts(version, is_gpu=is_gpu)
    assert len(sys.meta_path) - before == is_postponed
