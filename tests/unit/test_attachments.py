"""Attachments: their digest, and which positions are refused."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from protocol.engine.attachments import AttachedTensor, Attachment, attachment_digest
from protocol.engine.messages import Generate
from protocol.wire.arrays import Int32, UInt8

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
    image = attachment((2, 3), (7, 1), grid=(1, 2, 2))
    assert (image.num_tokens, image.first, image.end) == (4, 2, 8)
