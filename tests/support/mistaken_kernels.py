"""Kernels with a planted mistake, to show that the tests of the right ones would find it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.support.triton_code import interpreted


def mistaken_copy(
    source: Path, mistake: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """Return an interpreted copy of a module of kernels, in which the mistake's first text is
    replaced with its second. The copy is kept in `folder`, whose name is unique."""
    right, wrong = mistake
    text = source.read_text()
    assert right in text
    name = f"mistaken_{folder.name}"
    (folder / f"{name}.py").write_text(text.replace(right, wrong))
    monkeypatch.syspath_prepend(folder)
    return interpreted(name)
