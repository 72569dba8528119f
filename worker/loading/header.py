"""Reads a model's header: everything in its files except the weights. Needs no torch.

Reading checks that the tensors match the config and that every feature is supported. So an unusable
model is refused here, before a server starts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields, read_json
from worker.loading.gguf_file import GGUFFile
from worker.loading.gguf_header import gguf_config, hf_names
from worker.loading.gguf_tokenizer import gguf_text
from worker.loading.safetensors_files import DTYPE_BYTES, PICKLES, SafetensorsFiles, weight_files
from worker.loading.text import TextFacts, directory_text
from worker.models.config import LlamaConfig, llama_config
from worker.models.tensors import EMBEDDING, HEAD_WEIGHT, check_tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """Everything in a model's files except the weights."""

    name: str
    config: LlamaConfig
    files: SafetensorsFiles | GGUFFile
    #: Hugging Face name of each tensor -> its number type, as the file format calls it.
    kinds: dict[str, str]
    text: TextFacts
    #: The weight files, in a fixed order.
    paths: list[Path]

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def tokenizer(self) -> bytes:
        return self.text.tokenizer


def read_header(path: Path) -> ModelHeader:
    """Read a Hugging Face directory or a GGUF file. Raises UnusableModel with the reason."""
    if path.is_dir():
        return _directory_header(path)
    if path.suffix in PICKLES:
        raise UnusableModel(
            f"{path} is a pickle file, which can run code when it is read; this is not supported",
            remedy="convert it to safetensors",
        )
    if not path.is_file():
        raise UnusableModel(f"{path} does not exist")
    return _gguf_header(path)


def _directory_header(path: Path) -> ModelHeader:
    config_json = read_json(path / "config.json")
    config = llama_config(config_json)
    paths = weight_files(path)
    text = directory_text(path, Fields(config_json, "config.json"), config.vocab_size)
    files = SafetensorsFiles(paths)
    config = _untied_if_heads_differ(config, files)
    check_tensors(config, {name: tensor.shape for name, tensor in files.tensors.items()})
    kinds = {name: tensor.dtype for name, tensor in files.tensors.items()}
    _check_kinds(kinds, DTYPE_BYTES)
    return ModelHeader(path.resolve().name, config, files, kinds, text, paths)


def _gguf_header(path: Path) -> ModelHeader:
    file = GGUFFile(path)
    config, names = gguf_config(file), hf_names(file)
    check_tensors(config, {ours: file.tensors[theirs].shape for ours, theirs in names.items()})
    kinds = {ours: file.tensors[theirs].kind for ours, theirs in names.items()}
    for name, kind in kinds.items():
        if not kind.is_readable:
            raise UnusableModel(f"{path}: type {kind.name} (of tensor {name}) is not supported")
    text = gguf_text(Fields(file.metadata, str(path)), config.vocab_size)
    kind_names = {name: kind.name for name, kind in kinds.items()}
    return ModelHeader(path.stem, config, file, kind_names, text, [path])


def _untied_if_heads_differ(config: LlamaConfig, files: SafetensorsFiles) -> LlamaConfig:
    """Return `config`, untied if the files have a head that differs from the embeddings.

    transformers does the same.
    """
    both = EMBEDDING in files.tensors and HEAD_WEIGHT in files.tensors
    if not (config.tied_embeddings and both) or files.are_equal(EMBEDDING, HEAD_WEIGHT):
        return config
    log.warning(
        "tie_word_embeddings is true, but %s differs from the embeddings and is used instead",
        HEAD_WEIGHT,
    )
    return replace(config, tied_embeddings=False)


def _check_kinds(kinds: dict[str, str], supported: Iterable[str]) -> None:
    for name, kind in kinds.items():
        if kind not in supported:
            raise UnusableModel(f"{name} has dtype {kind}; supported: {', '.join(supported)}")
