"""Attachments: the images that a prompt contains, as a client sends them.

A client decodes and preprocesses an image into the tensors that the model's encoder takes. It sends
the tensors once (`AttachData`), under the digest of their content. A `Generate` only says at which
positions of its prompt the image stands (`Attachment`). At these positions the prompt has the ids
of placeholders, and the worker puts the rows there that the encoder makes of the image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.wire.arrays import UInt8

MAX_ATTACHMENTS = 1024
"""Most attachments of one request."""
MAX_TENSORS = 16
"""Most tensors of one attachment."""
MAX_TENSOR_DIMS = 8

AttachmentKind = Literal["image"]
TensorType = Literal["float32", "int64", "uint8", "bool"]
ITEM_BYTES: dict[TensorType, int] = {"float32": 4, "int64": 8, "uint8": 1, "bool": 1}

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Position = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=1, lt=1 << 31)]


class AttachedTensor(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One input of an encoder, as the image processor of the model's family returns it for this
    image alone: with the axis of a batch of one image, if the family has such an axis.

    The constructor raises ValueError if the data do not fill the shape.
    """

    #: The keyword argument of the encoder: "pixel_values", "image_grid_thw".
    name: str
    dtype: TensorType
    shape: list[Position]
    #: [bytes] the items in row order, little-endian. A bool is a byte that is 0 or 1.
    data: UInt8

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_TENSOR_DIMS:
            raise ValueError(f"{self.name}: {len(self.shape)} dimensions")
        if prod(self.shape) * ITEM_BYTES[self.dtype] != self.data.data.nbytes:
            raise ValueError(
                f"{self.name}: {self.data.data.nbytes:,} bytes do not fill {self.shape} of "
                f"{self.dtype}"
            )


class Attachment(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The position of an attachment in a prompt. The constructor raises ValueError if the runs are
    empty, overlap or are not in order."""

    #: `attachment_digest` of its tensors.
    digest: Digest
    kind: AttachmentKind
    #: (first position, number of positions) of each run of placeholders, in order. All runs
    #: together have one position for each row that the encoder makes. Positions between two runs
    #: are text, such as the labels of tiles.
    runs: list[tuple[Position, Count]]
    #: (frames, rows, columns) of the encoder's rows, for models whose rotary positions have several
    #: axes; their product is the number of rows. None: positions are those in the prompt.
    grid: tuple[Count, Count, Count] | None = None

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("an attachment needs at least one run of positions")
        end = 0
        for first, count in self.runs:
            if first < end:
                raise ValueError(f"runs of an attachment overlap at position {first}")
            end = first + count
        if self.grid is not None and len(self.runs) > 1:
            raise ValueError("an attachment with a grid has only one run of positions")
        if self.grid is not None and prod(self.grid) != self.num_tokens:
            raise ValueError(f"grid {self.grid} does not have {self.num_tokens} positions")

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def first(self) -> int:
        """The position of the first placeholder."""
        return self.runs[0][0]

    @property
    def end(self) -> int:
        """The position after the last placeholder."""
        first, count = self.runs[-1]
        return first + count


def attachment_digest(tensors: Sequence[AttachedTensor]) -> str:
    """Return the SHA-256 of the tensors in hex. It covers names, types, shapes and items, so equal
    digests mean equal inputs of the encoder."""
    digest = hashlib.sha256()
    for tensor in tensors:
        head = [tensor.name, tensor.dtype, tensor.shape]
        digest.update(msgspec.msgpack.encode(head))
        digest.update(tensor.data.data)
    return digest.hexdigest()


def attached_bytes(tensors: Sequence[AttachedTensor]) -> int:
    return sum(tensor.data.data.nbytes for tensor in tensors)


class ImageSupport(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a client must know to put images into a prompt of a model (`ModelCard.images`)."""

    #: `model_type` of config.json, which names the family: "qwen3_vl".
    model_type: str
    #: Id of the placeholder. Every position of an attachment's runs has this id.
    token_id: int
    #: Name -> content of the checkpoint's files that describe the preprocessing: config.json and,
    #: if they exist, preprocessor_config.json and processor_config.json.
    files: dict[str, bytes] = {}
    #: Why images are refused, with the remedy; "": the worker can encode them.
    reason: str = ""
    #: Whether the positions of a run see each other, so that a run is computed in one step.
    sees_whole_runs: bool = False
    #: Whether rotary positions have several axes, so that each attachment needs a grid.
    needs_grid: bool = False
    #: Most rows of one attachment that the server has memory for; 0: no limit.
    max_tokens: int = 0
