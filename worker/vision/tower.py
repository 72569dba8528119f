"""The encoder of a model's images, computed by transformers' own classes.

The class of the whole model is built with a text part of one tiny layer, which is never computed.
Then the other weights are read from the checkpoint. One image is encoded at a time, in float32 and
by a fixed number of threads, so its rows have the same bits whenever they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protocol.engine.attachments import AttachedTensor, attachment_digest
from worker.device.postponed import TORCH_SHAPES, load_postponed
from worker.errors import UnusableModel
from worker.vision.encoder_files import EncoderFiles
from worker.vision.support import shrunk_text
from worker.vision.tensor_names import is_of_images, tower_key

BUILD_ERRORS = (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError)
"""Exceptions of transformers' classes for a config.json that they cannot read."""


class ImageTower:
    """The image encoder of one model.

    hidden      size of the model's hidden states
    dtype       that of the model, to which rows are rounded
    scale       factor of the rows that stand in place of embeddings
    num_added   how many layers of the model add to the hidden states of an image (DeepStack)
    num_bytes   size of its weights
    """

    def __init__(self, model: Any, hidden: int, dtype: torch.dtype, scale: float = 1.0) -> None:
        self._model = model
        self._scale = scale
        self.hidden, self.dtype = hidden, dtype
        layers = getattr(model.config.vision_config, "deepstack_visual_indexes", None)
        self.num_added = len(layers or ())
        weights = _weights(model).values()
        self.num_bytes = sum(each.numel() * each.element_size() for each in weights)

    @property
    def row_bytes(self) -> int:
        """Return the size of a row."""
        return (1 + self.num_added) * self.hidden * self.dtype.itemsize

    @classmethod
    def load(
        cls, files: EncoderFiles, hidden: int, dtype: torch.dtype, *, scale: float = 1.0
    ) -> ImageTower:
        """Load an encoder. Raises UnusableModel, without a path, if transformers cannot build it,
        or if weights of it are missing, quantised or of other shapes."""
        # The config is not trusted, and its numbers may make any size of encoder. So no memory is
        # allocated before all shapes are known to be those of the files.
        with torch.device("meta"):
            planned = _built(files.config)
        _check_shapes(planned, files.shapes)
        model = _built(files.config).eval().requires_grad_(False)
        parameters = dict(model.named_parameters())
        wanted = _weights(model)
        found = files.read({tower_key(name) for name in wanted})
        for name, target in wanted.items():
            value = found.get(tower_key(name))
            if value is not None:
                target.copy_(value)
            elif name in parameters:
                raise UnusableModel(f"{name} is quantised")
        for name, value in parameters.items():
            if name not in wanted:
                value.data = value.data.new_empty(0)  # the text part, which is not computed
        return cls(model.model, hidden, dtype, scale)

    @torch.inference_mode()
    def encode(self, digest: str, tensors: Sequence[AttachedTensor], num_rows: int) -> Tensor:
        """Return the rows [num_rows, 1 + num_added, hidden] of one image: what stands in
        place of embeddings, and what each of the first layers adds. Raises ValueError if the
        tensors do not fit the encoder, are not those of the digest, or make another number of
        rows."""
        if attachment_digest(tensors) != digest:
            raise ValueError("the image's tensors are not those of its digest")
        inputs = {tensor.name: _tensor(tensor) for tensor in tensors}
        try:
            made = self._model.get_image_features(**inputs)
        except (RuntimeError, TypeError, IndexError, KeyError, AttributeError) as error:
            raise ValueError(f"the image's tensors do not fit the encoder: {error}") from error
        added = (getattr(made, "deepstack_features", None) or []) if self.num_added else []
        parts = [_joined(part).reshape(-1, self.hidden) for part in (made, *added)]
        if len(parts[0]) != num_rows:
            raise ValueError(f"the image has {len(parts[0]):,} tokens; expected {num_rows:,}")
        if self._scale != 1.0:
            parts[0] = parts[0].float() * self._scale
        return torch.stack(parts, 1).to(self.dtype)


def _built(content: Mapping[str, Any]) -> Any:
    """Return the class of the whole model with random weights and a tiny text part.

    content   that of config.json
    """
    load_postponed(TORCH_SHAPES)  # transformers' classes need it
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    try:
        config = CONFIG_MAPPING[content["model_type"]].from_dict(dict(content))
        shrunk_text(config)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    except BUILD_ERRORS as error:
        raise UnusableModel(f"transformers cannot build it: {error}") from error


def _weights(model: Any) -> dict[str, Tensor]:
    """Return the tensors of the encoder. Constants that files may leave out are among them."""
    return {name: each for name, each in model.state_dict().items() if is_of_images(name)}


def _check_shapes(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UnusableModel if a weight is missing in the files or has another shape there.

    shapes   `tower_key` -> shape in the files
    """
    parameters = dict(model.named_parameters())
    for name, each in _weights(model).items():
        shape = shapes.get(tower_key(name))
        if shape is None and name in parameters:
            raise UnusableModel(f"{name} is missing")
        if shape is not None and shape != (expected := tuple(each.shape)):
            raise UnusableModel(f"{name} has the shape {shape}; expected {expected}")


def _joined(made: Any) -> Tensor:
    """Return the rows of what `get_image_features` returns in one tensor."""
    if hasattr(made, "pooler_output"):
        made = made.pooler_output
    if isinstance(made, Tensor):
        return made
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in made])


def _tensor(tensor: AttachedTensor) -> Tensor:
    array = np.frombuffer(tensor.data.data, dtype=np.dtype(tensor.dtype)).reshape(tensor.shape)
    return torch.from_numpy(array.copy())
