"""The mutations of tests/torture/mutated_kernels.py still fit the source of the kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.emulated import CSRC
from tests.torture.mutated_kernels import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_the_source_of_the_kernels(mutation: Mutation, tmp_path: Path) -> None:
    copied = Path(shutil.copy(CSRC / mutation.file, tmp_path))
    mutation.apply(tmp_path)
    is_changed = copied.read_bytes() != (CSRC / mutation.file).read_bytes()
    assert is_changed == bool(mutation.changes)


def test_a_mutation_whose_text_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "linear.h").write_text("int x;")
    with pytest.raises(ValueError, match=r"linear\.h does not have once: int y"):
        Mutation("wrong", "linear.h", (("int y", "int z"),)).apply(tmp_path)
