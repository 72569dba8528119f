"""The rotary positions of images have three axes, and are the same however a prompt is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from protocol.engine.attachments import Attachment
from tests.unit.test_rope import rope_of
from worker.layers.rope import inverse_frequencies, rotation, turned_by_axes
from worker.slots.rope_positions import rope_shift, turn
from worker.spec.rope_config import AXES

SECTIONS = {"Qwen2_5_VL": [16, 24, 24], "Qwen3VL": [24, 20, 20]}


def image(first: int, rows: int, columns: int) -> Attachment:
    runs = [(first, rows * columns)]
    return Attachment(digest="0f" * 32, kind="image", runs=runs, grid=(1, rows, columns))


def positions(images: list[Attachment], start: int, end: int) -> list[list[int]]:
    found = np.tile(np.arange(start, end), (AXES, 1))
    turn(found, start, images)
    coordinates: list[list[int]] = found.tolist()
    return coordinates


def test_a_text_continues_after_the_longest_side_of_an_image() -> None:
    images = [image(2, 2, 3)]
    assert positions(images, 0, 10) == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert rope_shift(images) == 5 - 8


def test_each_part_of_a_prompt_has_its_positions_in_the_whole() -> None:
    plain = Attachment(digest="0f" * 32, kind="image", runs=[(18, 2)])  # without a grid
    images = [image(0, 3, 2), image(6, 1, 4), image(12, 2, 2), plain]
    whole = positions(images, 0, 24)
    for start in range(24):
        for end in range(start + 1, 25):
            assert positions(images, start, end) == [axis[start:end] for axis in whole]
    assert [axis[-1] for axis in whole] == [23 + rope_shift(images)] * AXES


@pytest.mark.parametrize("family", SECTIONS)
def test_pairs_are_turned_as_in_transformers(family: str) -> None:
    import transformers

    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": SECTIONS[family],
    }
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128}
    config = getattr(transformers, f"{family}TextConfig")(**sizes, rope_parameters=parameters)
    module = getattr(transformers.models, {"Qwen3VL": "qwen3_vl"}.get(family, "qwen2_5_vl"))
    code = getattr(module, f"modeling_{module.__name__.rpartition('.')[2]}")
    names = [
        name for name in vars(code) if name.endswith("RotaryEmbedding") and "Vision" not in name
    ]
    theirs = getattr(code, names[0])(config)
    at = torch.randint(0, 900, (AXES, 50), generator=torch.Generator().manual_seed(3))
    cos, sin = theirs(torch.zeros(1), at[:, None])

    rope = rope_of(
        {**sizes, "rope_parameters": parameters, "mrope_interleaved": family == "Qwen3VL"}
    )
    frequencies = inverse_frequencies(rope)
    of_axes = [rotation(axis, frequencies, torch.float32) for axis in at]
    our_cos, our_sin = turned_by_axes(of_axes, rope.axes)
    torch.testing.assert_close(our_cos[:, 0], cos[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(our_sin[:, 0, 64:], sin[0, :, 64:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("sections", [None, [16, 24], [16, 24, 23], [16, 24, 24.0], "16, 24, 24"])
def test_sections_that_do_not_fit_give_no_axes(sections: Any) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    assert rope_of({"head_dim": 128, "rope_parameters": parameters}).axes == ()
