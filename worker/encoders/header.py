"""Reads the header of an encoder: everything in its files except the weights. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from protocol.config.worker import PoolingOption
from protocol.engine.encoding import EncodingCard
from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.safetensors_files import DTYPE_BYTES, SafetensorsFiles, weight_files
from worker.checkpoint.text import TextFacts, directory_name, directory_text
from worker.encoders.families.family import EncoderFamily
from worker.encoders.modules import (
    VectorSpec,
    max_input_tokens,
    read_modules,
    with_activation,
)
from worker.encoders.spec import EncoderSpec
from worker.encoders.tensors import EncoderTensors
from worker.errors import UnusableModel
from worker.spec.fields import Fields, read_json
from worker.spec.tensor_names import with_found_prefix

DEFAULT_VECTORS = VectorSpec(pooling="mean")
"""The vectors of an encoder whose files do not describe them. The pooling is that of
sentence-transformers, and the vectors have length 1."""

WITHOUT_TYPES = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")
"""Values of `tokenizer_class` of tokenizers that belong to no family."""


@dataclass(frozen=True, slots=True)
class EncoderHeader:
    """Everything except the weights in the files of an encoder."""

    name: str
    tensors: EncoderTensors
    #: None: there are no weights, only a config.json.
    files: SafetensorsFiles | GGUFFile | None
    #: Name of each tensor -> its number type, as the file format calls it.
    kinds: dict[str, str]
    text: TextFacts
    #: The weight files, in a fixed order. Without weights, the config.json.
    paths: list[Path]
    #: How its vectors are made. A model that scores does not use it.
    vectors: VectorSpec

    @property
    def spec(self) -> EncoderSpec:
        return self.tensors.spec

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def tokenizer(self) -> bytes:
        return self.text.tokenizer

    def with_pooling(self, pooling: PoolingOption) -> EncoderHeader:
        """Return the header of the model if the operator has chosen a pooling. Raises UnusableModel
        if the model has none."""
        if pooling == "auto":
            return self
        if pooling == "rank":
            if self.spec.head is not None:
                return self
            raise UnusableModel(
                "an encoder without a head cannot rank", remedy="serve without --pooling rank"
            )
        if self.spec.head is not None:
            raise UnusableModel(
                "a model that scores pairs has no pooling to choose",
                remedy="serve without --pooling",
            )
        return replace(self, vectors=replace(self.vectors, pooling=pooling))

    @property
    def encoding(self) -> EncodingCard:
        spec = self.spec
        if spec.head is None:
            return self.vectors.card("embed", spec.hidden, spec.context_tokens)
        limit = min(self.vectors.max_tokens or spec.context_tokens, spec.context_tokens)
        return EncodingCard(task="score", max_tokens=limit, size=1)


def directory_encoder(
    path: Path, config: Mapping[str, Any], family: EncoderFamily
) -> EncoderHeader:
    """Return the header of an encoder in a Hugging Face directory. Raises UnusableModel with the
    reason if it cannot be served."""
    spec = replace(family.spec(with_activation(config, path)), types_texts=_types_texts(path))
    paths = weight_files(path)
    text = directory_text(path, Fields(config, "config.json"), spec.vocab_size)
    files = SafetensorsFiles(paths)
    names = family.names(spec)
    unused = tuple(start for each in family.unused for start in (each, names.prefix + each))
    names = with_found_prefix(names, list(files.tensors))
    tensors = EncoderTensors(spec, names, unused)
    tensors.check({name: tensor.shape for name, tensor in files.tensors.items()})
    kinds = {name: tensor.dtype for name, tensor in files.tensors.items()}
    used = {name for name, _ in tensors.tensors()}
    for name in used:
        if kinds[name] not in DTYPE_BYTES:
            raise UnusableModel(
                f"{name} has dtype {kinds[name]}; supported: {', '.join(DTYPE_BYTES)}"
            )
    vectors = read_modules(path, spec.hidden) if spec.head is None else None
    return EncoderHeader(
        directory_name(path),
        tensors,
        files,
        {name: kinds[name] for name in used},
        text,
        paths,
        vectors or replace(DEFAULT_VECTORS, max_tokens=max_input_tokens(path)),
    )


def _types_texts(path: Path) -> bool:
    """Return whether the tokenizer gives the two texts of a pair different token types. If
    tokenizer_config.json lists the model's inputs, the list decides; otherwise the tokenizer's
    class, as in version 5 of transformers."""
    file = path / "tokenizer_config.json"
    settings = read_json(file) if file.is_file() else {}
    names = settings.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return settings.get("tokenizer_class") not in WITHOUT_TYPES


def config_encoder(path: Path, config: Mapping[str, Any], family: EncoderFamily) -> EncoderHeader:
    """Return the header of an encoder without weight files, from its config.json at `path`."""
    spec = family.spec(config)
    tensors = EncoderTensors(spec, family.names(spec))
    kinds = {name: "BF16" for name, _ in tensors.tensors()}
    return EncoderHeader(
        path.stem, tensors, None, kinds, TextFacts(b"", []), [path], DEFAULT_VECTORS
    )
