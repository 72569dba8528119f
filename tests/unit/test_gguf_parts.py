"""Models that are split into several GGUF files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from protocol.shared.gguf_parts import all_parts, is_later_part, model_name, part_of
from tests.support.checkpoints import random_llama
from tests.support.eager import EagerStepper, load, some_tokens
from tests.support.gguf_files import write_gguf
from worker.checkpoint.gguf_file import GGUFFile
from worker.errors import UnusableModel


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf", random_llama(), Kind.Q8_0)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "tiny.gguf", random_llama(), Kind.Q8_0, part_tensors=9)
    return sorted(tmp_path.glob("*.gguf"))


def refusal(path: Path) -> str:
    with pytest.raises(UnusableModel) as refused:
        GGUFFile(path)
    return f"{refused.value.message}; {refused.value.remedy}"


def test_the_parts_are_the_model(whole: Path, parts: list[Path]) -> None:
    assert len(parts) > 2
    one, several = GGUFFile(whole), GGUFFile(parts[0])
    assert several.paths == parts
    assert several.tensors.keys() == one.tensors.keys()
    assert {info.part for info in several.tensors.values()} == {*range(len(parts))}
    for name in one.tensors:
        assert several.content(name) == one.content(name)
        assert several.raw(name).tobytes() == one.content(name)
    tokens = some_tokens(20)
    loaded, expected = load(parts[0]), load(whole)
    assert loaded.card.name == expected.card.name == "tiny"
    logits = [EagerStepper(each, [tokens]).run([(20,)])[0] for each in (loaded, expected)]
    assert logits[0].equal(logits[1])


def test_only_the_first_part_is_the_model(parts: list[Path]) -> None:
    assert f"{parts[1]} is not the first part; name {parts[0]}" in refusal(parts[1])


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[-1].unlink()
    assert f"{parts[-1]} is missing: the model has {len(parts)} parts" in refusal(parts[0])


def test_a_part_with_another_name_is_refused(parts: list[Path]) -> None:
    other = parts[0].rename(parts[0].with_name("mine.gguf"))
    text = refusal(other)
    assert f"{other} is one of {len(parts)} parts, but is not named like one" in text
    assert f"-of-0000{len(parts)}.gguf" in text


def test_a_file_in_the_place_of_another_part_is_refused(whole: Path, parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    assert f"{parts[2]}: it is not part 3 of {len(parts)}" in refusal(parts[0])
    shutil.copy(whole, parts[2])
    assert f"{parts[2]}: it is not part 3 of {len(parts)}" in refusal(parts[0])


def test_a_part_that_was_written_for_another_split_is_refused(
    parts: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    write_gguf(folder / "tiny.gguf", random_llama(num_hidden_layers=1), part_tensors=4)
    others = sorted(folder.glob("*.gguf"))
    count = min(len(parts), len(others))
    for path in parts[count:]:
        path.unlink()
    names = all_parts(f"tiny-00001-of-{len(others):05}.gguf")
    mixed = [tmp_path / name for name in names]
    for source, target in zip([others[0], *parts[1:count]], mixed, strict=False):
        shutil.copy(source, target)
    for target, other in zip(mixed[count:], others[count:], strict=True):
        shutil.copy(other, target)
    assert re.search(r"it is not part 2 of|has the tensor|tensors, not", refusal(mixed[0]))


def test_names_of_parts() -> None:
    second = "a/m-Q4_K_M-00002-of-00003.gguf"
    assert part_of(second) == (2, 3)
    assert all_parts(second)[0] == "a/m-Q4_K_M-00001-of-00003.gguf"
    assert len(all_parts(second)) == 3
    assert is_later_part(second)
    assert not is_later_part(all_parts(second)[0])
    assert model_name(Path(second)) == "m-Q4_K_M"
    for path in ("m.gguf", "m-1-of-3.gguf", "m-00001-of-00003.safetensors"):
        assert part_of(path) is None
        assert all_parts(path) == [path]
        assert not is_later_part(path)
    assert model_name(Path("a/m.gguf")) == "m"
