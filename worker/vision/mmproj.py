"""Reads the image encoder of a GGUF model from llama.cpp's mmproj file. Only reading the tensors
needs torch."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.shared.mmproj import KIND_KEYS
from worker.checkpoint.gguf_families import ENCODER
from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.gguf_tokens import CONTROL, USER_DEFINED
from worker.errors import UnusableModel
from worker.spec.fields import Fields
from worker.vision.encoder_files import TEXTS, EncoderFiles
from worker.vision.mmproj_header import OTHER_FILE, MmprojHeader, Projector, Stored
from worker.vision.projectors import PROJECTORS

if TYPE_CHECKING:
    from torch import Tensor


class MmprojEncoder(EncoderFiles):
    """The encoder of an mmproj file.

    path    the file
    model   the GGUF file of the model

    The constructor raises UnusableModel if the file is no mmproj file, if its projector is not
    served, or if it is not of this model.
    """

    def __init__(self, path: Path, model: GGUFFile) -> None:
        self._file = file = GGUFFile(path)
        projector = _projector(file)
        architecture = str(model.metadata.get("general.architecture"))
        if architecture not in projector.architectures:
            raise UnusableModel(
                f"{path} is of a model of the architecture {' or '.join(projector.architectures)}, "
                f"and {model.path} is a {architecture!r:.80}",
                remedy=OTHER_FILE,
            )
        width = model.tensors["token_embd.weight"].shape[1]
        header = MmprojHeader(file, width, _placeholder(projector, model))
        name, axis = projector.last
        if (found := header.shape(name, 2)[axis]) != width:
            raise header.of_another_model(
                f"its rows have a width of {found:,}, and the model's {width:,}"
            )
        projector.check(header, Fields(model.metadata, str(model.path)))
        self._tensors = projector.tensors(header)
        for stored in self._tensors.values():
            for name in stored.names:
                if not header.tensor(name).kind.is_readable:
                    raise header.wrong(f"{name!r} has a type that is not supported")
                if header.tensor(name).shape != header.tensor(stored.names[0]).shape:
                    raise header.wrong(f"{name!r} has another shape than {stored.names[0]!r}")
        texts = projector.texts(header)
        self.config = texts[0]
        self.texts = {n: json.dumps(each).encode() for n, each in zip(TEXTS, texts, strict=True)}
        self.paths = [path]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {key: self._shape(stored) for key, stored in self._tensors.items()}

    def _shape(self, stored: Stored) -> tuple[int, ...]:
        first, *others = self._file.tensors[stored.names[0]].shape
        count = len(stored.names)
        if count == 1 or stored.joins_rows:
            return (count * first, *others)
        return (first, others[0], count, *others[1:])

    def read(self, keys: Container[str]) -> Mapping[str, Tensor]:
        return {key: self._tensor(stored) for key, stored in self._tensors.items() if key in keys}

    def _tensor(self, stored: Stored) -> Tensor:
        import torch

        from worker.checkpoint.gguf_weights import read_tensor

        parts = []
        for name in stored.names:
            part = torch.empty(self._file.tensors[name].shape)
            read_tensor(self._file, name, part)
            parts.append(part)
        if len(parts) == 1:
            whole = parts[0]
        else:
            whole = torch.cat(parts) if stored.joins_rows else torch.stack(parts, 2)
        if stored.heads:
            pairs = whole.reshape(stored.heads, -1, 2, *whole.shape[1:])
            whole = pairs.transpose(1, 2).reshape(whole.shape)
        return whole - stored.added if stored.added else whole


def _projector(file: GGUFFile) -> Projector:
    """Return how the encoder in a file is read."""
    fields = Fields(file.metadata, str(file.path))
    if fields.get("general.architecture") != ENCODER:
        raise UnusableModel(
            f"{file.path} is a GGUF file, but not an mmproj file", remedy=OTHER_FILE
        )
    kind = next(filter(None, (fields.text(key, "") for key in KIND_KEYS)), "")
    if kind not in PROJECTORS:
        raise UnusableModel(
            f"{file.path} has an encoder of the kind {kind!r:.80}, which is not supported; "
            f"supported: {', '.join(PROJECTORS)}",
            remedy="serve the model's safetensors, or text only with --mmproj none",
        )
    return PROJECTORS[kind]


def _placeholder(projector: Projector, model: GGUFFile) -> int:
    """Return the id of the token that stands for images in prompts: one whose text is always a
    token of its own."""
    tokens: Sequence[str] = model.metadata.get("tokenizer.ggml.tokens") or ()
    types: Sequence[int] = model.metadata.get("tokenizer.ggml.token_type") or ()
    for text in projector.placeholders:
        number = tokens.index(text) if text in tokens else len(types)
        if number < len(types) and types[number] in (CONTROL, USER_DEFINED):
            return number
    raise UnusableModel(
        f"the vocabulary of {model.path} has no token {projector.placeholders[0]!r} to stand for "
        "images",
        remedy="use a GGUF file that was made of a model that reads images",
    )
