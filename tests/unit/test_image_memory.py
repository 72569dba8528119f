"""The memory of preprocessed images: what requests use is counted until no request uses it."""

from __future__ import annotations

import pytest

from gateway.images.families import ImageFacts
from gateway.images.memory import FileMemory, ImageMemory, ProcessedImage
from protocol.engine.attachments import AttachedTensor
from protocol.wire.arrays import UInt8
from protocol.wire.errors import Overloaded


def image(num_bytes: int = 40) -> ProcessedImage:
    data = UInt8(bytes(num_bytes))
    tensor = AttachedTensor(name="x", dtype="bool", shape=[num_bytes], data=data)
    return ProcessedImage("", [tensor], ImageFacts({}, {}))


def test_the_images_that_were_used_last_are_kept() -> None:
    memory = ImageMemory(100)
    assert memory.put("a", image())
    assert memory.put("b", image())
    assert memory.get("a") is not None
    assert memory.put("c", image())
    assert [memory.get(key) is None for key in "abc"] == [False, True, False]
    assert memory.num_bytes == 80


def test_an_image_that_a_request_uses_is_counted_and_found() -> None:
    memory = ImageMemory(100)
    used = [image(90)]
    assert memory.put("a", used[0])
    assert not memory.put("b", image(20))
    assert memory.get("a") is used[0]
    assert memory.get("b") is None
    assert memory.num_bytes == 90
    used.clear()
    assert memory.put("b", image(20))
    assert (memory.get("a"), memory.num_bytes) == (None, 20)


def test_an_image_larger_than_the_memory_is_not_kept() -> None:
    memory = ImageMemory(100)
    assert not memory.put("a", image(101))
    assert (memory.get("a"), memory.num_bytes) == (None, 0)


def test_files_count_until_they_are_preprocessed() -> None:
    files = FileMemory(100)
    with files.file() as grow:
        grow(60)
        with files.file() as grow_other:
            grow_other(40)
            with pytest.raises(Overloaded, match="being loaded"):
                grow_other(1)
        assert files.num_bytes == 60
        grow(40)
    assert files.num_bytes == 0
