"""Models that are split into several GGUF files."""

from __future__ import annotations

import shutil
import struct
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
    assert f"{parts[1]} is not the first part; serve {parts[0]} instead" in refusal(parts[1])


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[-1].unlink()
    assert f"{parts[-1]} is missing: the model has {len(parts)} parts" in refusal(parts[0])


def test_a_part_with_another_name_is_refused(parts: list[Path]) -> None:
    other = parts[0].rename(parts[0].with_name("mine.gguf"))
    text = refusal(other)
    assert (
        f"{other} is one of {len(parts)} parts of a model, which are found by their names" in text
    )
    assert f"must end with -00001-of-0000{len(parts)}.gguf" in text


def test_a_file_in_the_place_of_another_part_is_refused(whole: Path, parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    assert f"{parts[2]}: it is not part 3 of {len(parts)}" in refusal(parts[0])
    shutil.copy(whole, parts[2])
    assert f"{parts[2]}: it is not part 3 of {len(parts)}" in refusal(parts[0])


def test_a_part_that_repeats_a_tensor_is_refused(parts: list[Path]) -> None:
    tensors = GGUFFile(parts[0]).tensors
    first = [name for name, info in tensors.items() if info.part == 0]
    last = [name for name, info in tensors.items() if info.part == len(parts) - 1]
    one, other = next((a, b) for a in first for b in last if len(a) == len(b))
    content = parts[-1].read_bytes()
    assert content.count(other.encode()) == 1
    parts[-1].write_bytes(content.replace(other.encode(), one.encode()))
    assert f"an earlier part has the tensor {one!r} too" in refusal(parts[0])


def test_parts_that_lack_a_tensor_are_refused(parts: list[Path]) -> None:
    count = len(GGUFFile(parts[0]).tensors)
    content, key = parts[0].read_bytes(), b"split.tensors.count"
    at = content.index(key) + len(key) + 4  # the code of the type precedes the number
    changed = content[:at] + struct.pack("<I", count + 1) + content[at + 4 :]
    parts[0].write_bytes(changed)
    assert f"the parts of {parts[0]} have {count} tensors, not {count + 1}" in refusal(parts[0])


def test_names_of_parts() -> None:
    second = "a/m-Q4_K_M-00002-of-00003.gguf"
    assert part_of(second) == (2, 3)
    assert all_parts(second)[0] == "a/m-Q4_K_M-00001-of-00003.gguf"
    assert len(all_parts(second)) == 3
    assert is_later_part(second)
    assert not is_later_part(all_parts(second)[0])
    assert model_name(Path(second)) == "m-Q4_K_M"
    odd = ["m-00001-of-00000.gguf", "m-00003-of-00002.gguf", "m-0000\u0661-of-00002.gguf"]
    for path in ("m.gguf", "m-1-of-3.gguf", "m-00001-of-00003.safetensors", *odd):
        assert part_of(path) is None
        assert all_parts(path) == [path]
        assert not is_later_part(path)
    assert model_name(Path("a/m.gguf")) == "m"
