"""Preprocesses a decoded image with transformers. Only the sandbox process imports this module.

The image processors of transformers' kind "pil" need numpy and Pillow only, so torch is hidden from
transformers: importing it would take seconds and hundreds of megabytes. No code of a checkpoint is
run: the classes are those that `families` names, with the settings of the checkpoint.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from gateway.images.decode import BadImage, decoded
from gateway.images.settings import ProcessorSettings
from protocol.engine.attachments import AttachedTensor, TensorType
from protocol.wire.arrays import UInt8

_HIDDEN = ("torch", "torchvision")
MAX_FACT_ITEMS = 64
"""Most items of an output of a processor that a gateway may need to expand a marker."""

TYPE_OF_KIND: dict[str, TensorType] = {"f": "float32", "i": "int64", "u": "int64", "b": "bool"}
"""`dtype.kind` of an array -> the type in which it is sent."""


class Preprocessed(msgspec.Struct, frozen=True):
    """What a processor made of an image."""

    tensors: list[AttachedTensor]
    #: Small outputs of whole numbers, flattened, and the shapes of all outputs.
    numbers: dict[str, list[int]]
    shapes: dict[str, list[int]]
    decode_s: float
    preprocess_s: float


def _hide_torch() -> None:
    """Make transformers find no torch, although it may be installed. For this process only."""
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> Any:
        return None if name in _HIDDEN else find(name, package)

    importlib.util.find_spec = found


def preprocessed(data: bytes, settings: ProcessorSettings) -> Preprocessed:
    """Decode an image and preprocess it. Raises BadImage, or MemoryError."""
    processor = _processor(msgspec.json.encode(settings))
    started_at = time.monotonic()
    image = decoded(data)
    decoded_at = time.monotonic()
    try:
        outputs = processor(_batch(image, settings), return_tensors="np", **settings.arguments)
    except (ValueError, ZeroDivisionError) as error:
        raise BadImage(f"this model's image processor refuses the image: {error}") from None
    arrays = {name: np.asarray(value) for name, value in outputs.items()}
    if settings.has_company:
        arrays = {name: array[:1] for name, array in arrays.items()}
    return Preprocessed(
        [_tensor(name, arrays[name]) for name in settings.tensors if name in arrays],
        _numbers(arrays),
        {name: [*array.shape] for name, array in arrays.items()},
        decoded_at - started_at,
        time.monotonic() - decoded_at,
    )


def load(settings: ProcessorSettings) -> None:
    """Load a processor, so that its first image does not wait for that. Raises what transformers
    raises for bad settings."""
    _processor(msgspec.json.encode(settings))


@lru_cache(maxsize=4)
def _processor(settings: bytes) -> Any:
    if "transformers" not in sys.modules:
        _hide_torch()
    found = msgspec.json.decode(settings, type=ProcessorSettings)
    module, _, name = found.processor.rpartition(".")
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    return kind.from_dict(found.values)


def _batch(image: Image.Image, settings: ProcessorSettings) -> Any:
    """Return the argument of the processor. Some processors cut an image into tiles only if it is
    the only one, so an image that is not gets company, whose outputs are dropped."""
    return [[image, Image.new("RGB", (1, 1))]] if settings.has_company else [image]


def _tensor(name: str, array: np.ndarray) -> AttachedTensor:
    kind = TYPE_OF_KIND[array.dtype.kind]
    array = np.ascontiguousarray(array, dtype=np.dtype(kind))
    return AttachedTensor(
        name=name, dtype=kind, shape=[*array.shape], data=UInt8(array.reshape(-1).view(np.uint8))
    )


def _numbers(arrays: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    return {
        name: [int(item) for item in array.reshape(-1)]
        for name, array in arrays.items()
        if array.dtype.kind in "iu" and array.size <= MAX_FACT_ITEMS
    }
