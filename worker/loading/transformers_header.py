"""Reads the header of a model that the transformers library computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protocol.process.installation import install_command
from worker.checkpoint.safetensors_files import (
    DTYPE_BYTES,
    SafetensorsFiles,
    check_kinds,
    weight_files,
)
from worker.checkpoint.text import TextFacts, directory_name, directory_text
from worker.errors import UnusableModel
from worker.spec.architectures import (
    BITNET,
    TransformersArchitecture,
    TransformersSpec,
    bitnet_mode,
    with_own_cache,
)
from worker.spec.families.registry import FAMILIES
from worker.spec.fields import Fields

OTHER_KINDS = ("I64", "I32", "BOOL")
"""Types of tables that some classes of transformers have beside their weights."""
ADAPTER = "adapter_config.json"
"""transformers would load the adapter that this file describes into the model."""


@dataclass(frozen=True, slots=True)
class TransformersHeader:
    """Everything except the weights in the files of a model that transformers computes."""

    name: str
    spec: TransformersSpec
    text: TextFacts
    folder: Path
    #: The weight files, in a fixed order.
    paths: list[Path]

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def tokenizer(self) -> bytes:
        return self.text.tokenizer


def known_to_transformers(config: Mapping[str, Any]) -> TransformersArchitecture | None:
    """Return the architecture of a config if it is in none of our lists, but the installed
    transformers has a decoder of that name: one that is newer than the lists."""
    match config.get("architectures"):
        case [str(name)] if not any(name in family.architectures for family in FAMILIES):
            pass
        case _:
            return None
    if find_spec("transformers") is None:
        return None
    from worker.models import hf_own_cache

    return with_own_cache(name, config) if hf_own_cache.is_known(name) else None


def transformers_header(
    path: Path, config: dict[str, Any], architecture: TransformersArchitecture
) -> TransformersHeader:
    if (path / ADAPTER).exists():
        raise UnusableModel(f"{path / ADAPTER} describes an adapter, which is not supported")
    paths = weight_files(path)
    kinds = {name: tensor.dtype for name, tensor in SafetensorsFiles(paths).tensors.items()}
    is_packed = architecture.name == BITNET and bitnet_mode(config) == "offline"
    others = ("U8",) if is_packed else OTHER_KINDS if architecture.has_own_cache else ()
    check_kinds(kinds, (*DTYPE_BYTES, *others))
    if find_spec("transformers") is None:
        raise UnusableModel(
            f"{architecture.name} is computed by transformers, which is not installed",
            remedy=install_command("transformers"),
        )
    from worker.models import hf, hf_own_cache  # torch and transformers take seconds

    values = {"model_type": architecture.model_type, **config}
    describe = hf_own_cache.describe if architecture.has_own_cache else hf.describe
    spec = describe(architecture, values)
    text = directory_text(path, Fields(config, "config.json"), spec.vocab_size)
    return TransformersHeader(directory_name(path), spec, text, path, paths)
