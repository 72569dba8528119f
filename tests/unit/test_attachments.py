"""Attachments: their digest, which positions are refused, and which blocks they share."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from engine_core.admission.check_generate import check_images
from engine_core.blocks.hash import extend_hashes
from protocol.engine.attachments import (
    AttachedTensor,
    Attachment,
    ImageSupport,
    attachment_digest,
)
from protocol.engine.limits import Limits
from protocol.engine.messages import Generate
from protocol.wire.arrays import Int32, UInt8
from protocol.wire.errors import InvalidRequest
from tests.support.tokenizers import card_of, smollm2_tokenizer_json

DIGEST = "0f" * 32


def tensor(name: str = "pixel_values", *, values: tuple[float, ...] = (1.0, 2.0)) -> AttachedTensor:
    data = UInt8(array("f", values).tobytes())
    return AttachedTensor(name=name, dtype="float32", shape=[len(values)], data=data)


def attachment(*runs: tuple[int, int], grid: tuple[int, int, int] | None = None) -> Attachment:
    return Attachment(digest=DIGEST, kind="image", runs=list(runs), grid=grid)


def test_the_digest_covers_names_shapes_and_items() -> None:
    same = attachment_digest([tensor()])
    assert attachment_digest([tensor()]) == same
    bits = UInt8(tensor().data.data)
    others = [
        [tensor("pixels")],
        [tensor(values=(1.0, 3.0))],
        [AttachedTensor(name="pixel_values", dtype="float32", shape=[1, 2], data=bits)],
        [AttachedTensor(name="pixel_values", dtype="int64", shape=[1], data=bits)],
        [tensor(), tensor()],
    ]
    digests = [same, *map(attachment_digest, others)]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("runs", "grid", "problem"),
    [
        ([], None, "at least one run"),
        ([(3, 2), (4, 1)], None, "overlap at position 4"),
        ([(5, 1), (1, 1)], None, "overlap at position 1"),
        ([(0, 4)], (1, 2, 3), "does not have 4 positions"),
        ([(0, 2), (3, 4)], (1, 2, 3), "only one run"),
    ],
)
def test_runs_without_an_order_are_refused(runs: Any, grid: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        attachment(*runs, grid=grid)


def test_a_tensor_that_does_not_fill_its_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="8 bytes do not fill"):
        AttachedTensor(name="x", dtype="float32", shape=[3], data=tensor().data)


@pytest.mark.parametrize("attached", [[(0, 2), (2, 3)], [(3, 1), (1, 1)], [(0, 2), (1, 1)]])
def test_attachments_outside_the_prompt_or_out_of_order_are_refused(attached: Any) -> None:
    with pytest.raises(ValueError, match="in the prompt, in order, and apart"):
        Generate(
            request=1, prompt=Int32.of([7] * 4), attachments=[attachment(run) for run in attached]
        )


def test_an_attachment_counts_the_positions_of_its_runs() -> None:
    image = attachment((2, 3), (7, 1))
    assert (image.num_tokens, image.first, image.end) == (4, 2, 8)


def test_a_block_with_another_grid_is_not_shared() -> None:
    """Its keys have other rotary positions."""
    grids = [None, (1, 2, 4), (1, 4, 2)]
    found: list[bytes] = []
    for grid in grids:
        hashes: list[bytes] = []
        images = [attachment((0, 8), grid=grid)]
        extend_hashes(hashes, b"root", array("i", [7] * 8), 8, 1, images)
        found += hashes
    assert len(set(found)) == len(grids)


def test_a_model_with_positions_of_several_axes_needs_a_grid() -> None:
    support = ImageSupport(model_type="qwen3_vl", token_id=7, needs_grid=True)
    model = card_of(smollm2_tokenizer_json(), images=support)
    limits = Limits(
        max_len=9,
        max_slots=1,
        token_budget=9,
        block_tokens=8,
        num_blocks=9,
        prefix_cache=True,
        image_rows=9,
    )

    def check(grid: tuple[int, int, int] | None) -> None:
        image = attachment((0, 4), grid=grid)
        message = Generate(request=1, prompt=Int32.of([7] * 5), attachments=[image])
        check_images(message, [7] * 5, model, limits)

    check((1, 2, 2))
    with pytest.raises(InvalidRequest, match="needs the rows and columns of each image") as caught:
        check(None)
    assert caught.value.param == "attachments[0].grid"
