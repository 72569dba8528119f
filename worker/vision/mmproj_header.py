"""The part that is the same for all kinds of mmproj files: their header, and how they store
tensors. It works without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.checkpoint.gguf_file import GGUFFile, TensorInfo
from worker.errors import UnusableModel
from worker.spec.fields import Fields

EPSILON = "clip.vision.attention.layer_norm_epsilon"
MAX_PIXELS_ACROSS = 1 << 14
"""Largest edge of an image that is accepted from a file."""
OTHER_FILE = "give the mmproj file that was made of this model, or none to serve text only"
UNREADABLE = (
    "give another mmproj file of this model, serve its safetensors, or serve text only with "
    "--mmproj none"
)
"""The remedy for errors that do not give one."""
Config = dict[str, Any]


SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
"""The names of the matrices of an MLP, in files of older converters."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How a file holds a tensor of transformers' class: in one tensor or in several."""

    names: tuple[str, ...]
    #: What the converter has added to it.
    added: float = 0.0
    #: Whether the rows of several tensors follow each other. Else the tensors follow each other on
    #: a further axis, the third one.
    joins_rows: bool = False
    #: Number of heads whose rows the converter has interleaved: a row of the first half of a head,
    #: then one of its second half; 0: none.
    heads: int = 0


class MmprojHeader:
    """The metadata and tensors of an mmproj file, and the facts of its model that it depends on.

    width    width of the model's hidden states
    pad      id of the placeholder

    The constructor and the methods raise UnusableModel, which names the key or the tensor.
    """

    def __init__(self, file: GGUFFile, width: int, pad: int) -> None:
        self.source = str(file.path)
        self.fields = Fields(file.metadata, self.source)
        self.width, self.pad = width, pad
        self._file = file
        self.hidden, _, self.patch, _ = self.shape("v.patch_embd.weight", 4)
        self.num_layers = 0
        while f"v.blk.{self.num_layers}.ln1.weight" in file.tensors:
            self.num_layers += 1
        #: Whether the names of the two matrices of an MLP are swapped, as in files of older
        #: converters.
        first = self.shape("v.blk.0.ffn_up.weight", 2)
        self.is_swapped = first[0] == self.hidden != first[1]
        self.inner = first[self.is_swapped]

    def wrong(self, why: str) -> UnusableModel:
        return UnusableModel(f"{self.source}: {why}")

    def of_another_model(self, why: str) -> UnusableModel:
        return UnusableModel(f"{self.source}: {why}", remedy=OTHER_FILE)

    def tensor(self, name: str) -> TensorInfo:
        if name not in self._file.tensors:
            raise self.wrong(f"it has no tensor {name!r}")
        return self._file.tensors[name]

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        shape = self.tensor(name).shape
        if len(shape) != num_dims:
            raise self.wrong(f"{name!r} must have {num_dims} axes")
        return shape

    def size(self, name: str, default: int | None = None, *, most: int = MAX_PIXELS_ACROSS) -> int:
        """Return the number `clip.vision.NAME`, from 1 to `most`."""
        key = f"clip.vision.{name}"
        value = self.fields.integer(key, *([] if default is None else [default]))
        if not 1 <= value <= most:
            raise self.wrong(f"{key} is {value}; it must be from 1 to {most:,}")
        return value

    @property
    def num_positions(self) -> int:
        return self.shape("v.position_embd.weight", 2)[0]

    @property
    def added_layers(self) -> list[int]:
        """Numbers of the layers after which rows are made that the first layers of the model add
        (DeepStack)."""
        names = self._file.tensors
        return [n for n in range(self.num_layers) if f"v.deepstack.{n}.norm.weight" in names]

    def side(self, image: int) -> int:
        """Return the number of patches in a row of an image of `image` pixels."""
        side = image // self.patch
        if side * side != self.num_positions:
            raise self.wrong(
                f"it has {self.num_positions} positions, but clip.vision.image_size {image} and "
                f"patches of {self.patch} pixels make {side * side}"
            )
        return side

    def check_squares(self, name: str, key: str, scale: int) -> None:
        """Check that the matrix `name` reads `scale` x `scale` patches at a time, as the number
        `clip.vision.KEY` says."""
        if (found := self.shape(name, 2)[1]) != self.hidden * scale**2:
            raise self.wrong(
                f"clip.vision.{key} is {scale}, but {name!r} reads {found:,} numbers; patches have "
                f"{self.hidden:,}"
            )

    def merged(self, side: int, scale: int) -> int:
        """Return the number of rows of an image of `side` x `side` patches, of which `scale` x
        `scale` become one."""
        if side // scale < 1:
            raise self.wrong(f"{scale} patches in a row do not fit into {side}")
        return (side // scale) ** 2

    def colours(self) -> Config:
        """Return the mean and the deviation of each colour."""
        read = {"image_mean": Fields.number, "image_std": Fields.positive}
        found: Config = {}
        for name, number in read.items():
            key = f"clip.vision.{name}"
            values = self.fields.get(key, [0.5] * 3)
            if not isinstance(values, list) or len(values) != 3:
                raise self.wrong(f"{key} must have three numbers")
            each = Fields(
                {f"{key}[{index}]": value for index, value in enumerate(values)}, self.source
            )
            found[name] = [number(each, f"{key}[{index}]") for index in range(3)]
        return found

    def text_config(self, model_type: str) -> Config:
        """Return the config of a text part of the right width, which is never computed."""
        return {
            "model_type": model_type,
            "hidden_size": self.width,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 8,
        }

    @property
    def num_heads(self) -> int:
        heads = self.size("attention.head_count")
        if self.hidden % heads:
            raise self.wrong(f"{heads} heads do not divide a width of {self.hidden}")
        return heads

    def sizes(self) -> Config:
        """Return the keys of the encoder's config that have the same name in all families."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "patch_size": self.patch,
        }


def with_endings(names: Mapping[str, str]) -> dict[str, Stored]:
    """Return theirs -> how it is stored, for modules that have a weight and a bias."""
    return {
        f"{theirs}.{ending}": Stored((f"{ours}.{ending}",))
        for theirs, ours in names.items()
        for ending in ("weight", "bias")
    }


class Projector(ABC):
    """How the encoders of one `clip.projector_type` are read."""

    #: `model_type` whose classes compute the encoder and its image processor.
    model_type: str
    #: `general.architecture` of the models.
    architectures: frozenset[str]
    #: Texts of the placeholder. The first one that the vocabulary has is used. Nothing depends on
    #: which it is, but it should be no part of ordinary texts.
    placeholders: tuple[str, ...]
    #: The tensor that makes the model's rows, and the axis of these.
    last: tuple[str, int]

    def check(self, header: MmprojHeader, model: Fields) -> None:  # noqa: B027 - most check nothing
        """Check what else must be so that the encoder is supported, and that of the model.

        model   metadata of the model's file

        Raises UnusableModel.
        """

    @abstractmethod
    def texts(self, header: MmprojHeader) -> tuple[Config, Config, Config]:
        """Return what a directory has in the files TEXTS."""

    @abstractmethod
    def tensors(self, header: MmprojHeader) -> dict[str, Stored]:
        """Return `tower_key` -> how the file holds the tensor."""
