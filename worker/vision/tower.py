"""The encoder of a model's images, computed by transformers' own classes.

The class of the whole model is built with a text part of one tiny layer, which is never computed.
Then the other weights are read from the checkpoint. One image is encoded at a time, in float32 and
by a fixed number of threads, so its rows have the same bits whenever they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protocol.engine.attachments import AttachedTensor, attachment_digest
from worker.checkpoint.safetensors_files import weight_files
from worker.device.postponed import TORCH_SHAPES, load_postponed
from worker.errors import UnusableModel
from worker.spec.wrappers import text_name
from worker.vision.support import shrunk_text


class ImageTower:
    """The image encoder of one model.

    hidden      size of the model's hidden states
    num_added   how many layers of the model add to the hidden states of an image (DeepStack)
    num_bytes   size of its weights
    """

    def __init__(self, model: Any, hidden: int) -> None:
        self._model = model
        self.hidden = hidden
        layers = getattr(model.config.vision_config, "deepstack_visual_indexes", None)
        self.num_added = len(layers or ())
        self.num_bytes = sum(each.numel() * each.element_size() for each in model.parameters())

    @property
    def row_items(self) -> int:
        """Return how many numbers are kept of a row."""
        return (1 + self.num_added) * self.hidden

    @classmethod
    def load(cls, path: Path, hidden: int) -> ImageTower:
        """Load the encoder of the checkpoint `path`. Raises UnusableModel if weights of it are
        missing or have other shapes."""
        load_postponed(TORCH_SHAPES)  # transformers' classes need it
        from transformers import AutoConfig, AutoModelForImageTextToText

        config = AutoConfig.from_pretrained(path)
        shrunk_text(config)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        model = model.eval().requires_grad_(False)
        found = _read(path)
        wanted = {name: value for name, value in model.named_parameters() if _is_of_images(name)}
        for name, target in wanted.items():
            value = found.get(_key(name))
            if value is None or value.shape != target.shape:
                raise UnusableModel(f"{path}: the image encoder's {name} is missing or has no fit")
            target.copy_(value)
        for name, value in model.named_parameters():
            if name not in wanted:
                value.data = value.data.new_empty(0)  # the text part, which is not computed
        return cls(model.model, hidden)

    @torch.inference_mode()
    def encode(self, digest: str, tensors: Sequence[AttachedTensor], num_rows: int) -> Tensor:
        """Return the rows [num_rows, 1 + num_added, hidden] float32 of one image: what stands in
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
        parts = [_joined(part).reshape(-1, self.hidden).float() for part in (made, *added)]
        if len(parts[0]) != num_rows:
            raise ValueError(f"the image has {len(parts[0]):,} tokens; expected {num_rows:,}")
        return torch.stack(parts, 1)


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


def _key(name: str) -> str:
    """Return the name of a tensor without the prefix that only some files and classes have."""
    return name.removeprefix("model.")


def _is_of_images(name: str) -> bool:
    return text_name(name) is None or _key(name) == "image_newline"


def _read(path: Path) -> Mapping[str, Tensor]:
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for file in weight_files(path):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                if _is_of_images(name):
                    found[_key(name)] = opened.get_tensor(name).float()
    return found
