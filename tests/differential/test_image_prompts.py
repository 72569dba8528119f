"""Prompts with images have the ids, and the encoder's inputs the values, of transformers' processor
with the same settings."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gateway.images.families import FAMILIES, GridPrompter
from gateway.images.memory import Grow
from gateway.images.model_images import ModelImages
from gateway.images.reader import ImageReader
from gateway.images.source import ImageSource
from gateway.prompt.kwargs import ThinkingFields
from gateway.prompt.render import ChatRenderer, PromptConversation, RenderedPrompt, TemplateOptions
from gateway.text.tokenizer import Tokenizer
from protocol.wire.errors import InvalidRequest
from tests.support.image_models import MODELS, picture
from tests.support.templates import UnlimitedTemplates
from worker.vision.support import IMAGE_TOKENS, WITH_GRID

pytest.importorskip("transformers")

SMALL, WIDE, TALL, LARGE = (100, 80), (300, 60), (48, 200), (640, 480)
"""Width and height of images. transformers' Qwen processors refuse much narrower ones."""
NUMPY_OF = {"float32": np.float32, "int64": np.int64, "bool": np.bool_}


class NoFetcher:
    """The fetcher of a server without --image-urls."""

    def fetch(self, source: ImageSource, grow: Grow) -> bytes:
        raise InvalidRequest.at(source.param, "not fetched")


@pytest.fixture(scope="module")
def reader() -> Iterator[ImageReader]:
    with closing(ImageReader(NoFetcher(), offload=lambda work: work())) as found:
        yield found


def image(size: tuple[int, int], seed: int = 0) -> bytes:
    return picture(*size, seed)


def user(*parts: str | bytes) -> tuple[str, Sequence[str | bytes]]:
    return "user", parts


CONVERSATIONS: dict[str, list[tuple[str, Sequence[str | bytes]]]] = {
    "one image between texts": [user("Before.", image(SMALL), "After?")],
    "an image first": [user(image(LARGE), "What is this?")],
    "an image last": [user("What is this?", image(WIDE))],
    "several sizes": [user(image(TALL), "and", image(WIDE), image(SMALL), " differ")],
    "two turns": [
        ("system", ["Be brief."]),
        user("One:", image(SMALL)),
        ("assistant", ["A gradient."]),
        user(image(LARGE, 1), "\n\nand this?"),
    ],
    "no image": [user("Hello")],
}


@cache
def renderer_of(name: str, reader: ImageReader) -> ChatRenderer:
    card = MODELS[name].card()
    tokenizer = Tokenizer(card)
    return ChatRenderer(card, tokenizer, UnlimitedTemplates(), ModelImages(card, tokenizer, reader))


def rendered(name: str, reader: ImageReader, turns: Any) -> RenderedPrompt:
    messages = [{"role": role, "content": [*map(_part, parts)]} for role, parts in turns]
    options = TemplateOptions(thinking=ThinkingFields(), kwargs=None, defaults={})
    return renderer_of(name, reader).prompt(PromptConversation(messages=messages), options)


def _part(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = f"data:image/png;base64,{base64.b64encode(part).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def expected(name: str, turns: Any) -> Any:
    messages = [
        {
            "role": role,
            "content": [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image", "image": Image.open(BytesIO(part))}
                for part in parts
            ],
        }
        for role, parts in turns
    ]
    return MODELS[name].reference.apply_chat_template(
        messages, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="np"
    )


@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_ids_and_tensors_equal_those_of_transformers(
    name: str, turns: Any, reader: ImageReader
) -> None:
    prompt = rendered(name, reader, turns)
    reference = expected(name, turns)
    assert prompt.ids == reference["input_ids"][0].tolist()
    inputs: dict[str, list[np.ndarray]] = {}
    for content in prompt.images.contents:
        for each in content.tensors:
            flat: np.ndarray = np.frombuffer(each.data.data, NUMPY_OF[each.dtype])
            inputs.setdefault(each.name, []).append(flat.reshape(each.shape))
    for input_name, arrays in inputs.items():
        _check_equal(input_name, arrays, np.asarray(reference[input_name]))


def test_families_that_the_worker_encodes_have_prompts() -> None:
    assert IMAGE_TOKENS.keys() <= FAMILIES.keys()
    with_grid = {
        kind
        for kind, make in FAMILIES.items()
        if isinstance(make, type) and issubclass(make, GridPrompter)
    }
    assert with_grid == WITH_GRID


def _check_equal(name: str, arrays: Sequence[np.ndarray], reference: np.ndarray) -> None:
    """Compare the tensors of single images with those of the whole batch, in which smaller images
    are padded, and images of one conversation may share an axis."""
    if name == "batch_num_images":
        alone = reference.tolist() == [1]  # the encoder only needs to know this
        assert all((array.tolist() == [1]) == alone for array in arrays)
        return
    flat = reference
    if name in ("pixel_values", "pixel_attention_mask") and reference.shape[0] == 1 < len(arrays):
        flat = reference[0]
        arrays = [array[0] for array in arrays]
    joined = np.concatenate(arrays) if len({array.shape[1:] for array in arrays}) == 1 else None
    if joined is not None:
        assert np.array_equal(joined, flat[: len(joined)])
        return
    for array, padded in zip(arrays, flat, strict=True):
        inside = tuple(slice(size) for size in array.shape[1:])
        assert np.array_equal(array[0], padded[inside])
        assert np.count_nonzero(padded) == np.count_nonzero(array)
