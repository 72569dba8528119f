"""Reads the header of the head with which a checkpoint proposes tokens (spec/draft_head.py).

Nothing of a head is checked unless it is used: a model is served without drafts even if its head
has a form that is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.gguf_header import tensor_shapes
from worker.checkpoint.quantized_layers import QuantizedFiles, QuantizedLayer
from worker.checkpoint.safetensors_files import DTYPE_BYTES, SafetensorsFiles, check_kinds
from worker.errors import UnusableModel
from worker.loading.header import AnyHeader, ModelHeader
from worker.spec.draft_head import DraftHeadTensors
from worker.spec.quantization import PACKED_AS

OTHER_METHODS = "use --speculation ngram, or --speculation model with a --draft-model"


@dataclass(frozen=True, slots=True)
class DraftHeadHeader:
    """Everything except the weights of a head.

    kinds       as in ModelHeader, of the model's tensors and of the head's
    quantized   the head's quantised layers by the names of their weights; None: the checkpoint is
                not quantised
    """

    tensors: DraftHeadTensors
    kinds: Mapping[str, str]
    quantized: dict[str, QuantizedLayer] | None


def read_draft_head(header: AnyHeader) -> DraftHeadHeader:
    """Return the header of a model's head. Raises UnusableModel if the model has none, or one that
    is not supported."""
    tensors = header.draft_head if isinstance(header, ModelHeader) else None
    if not isinstance(header, ModelHeader) or tensors is None:
        raise UnusableModel(
            f"{_reason(header)}, so --speculation mtp is not possible", remedy=OTHER_METHODS
        )
    files = header.files
    try:
        if isinstance(files, SafetensorsFiles):
            return _in_safetensors(header, tensors, files)
        if files is not None:
            tensors.check(tensor_shapes(files))
    except UnusableModel as error:
        raise UnusableModel(
            f"the head for --speculation mtp cannot be used: {error.message}", remedy=OTHER_METHODS
        ) from error
    return DraftHeadHeader(tensors, header.kinds, None)


def _in_safetensors(
    header: ModelHeader, tensors: DraftHeadTensors, files: SafetensorsFiles
) -> DraftHeadHeader:
    stored = {name: files.tensors[name] for name, _ in tensors.tensors() if name in files.tensors}
    shapes = {name: each.shape for name, each in stored.items()}
    kinds, layers = {name: each.dtype for name, each in stored.items()}, None
    if header.quantized is not None:
        quantized = QuantizedFiles(header.quantized.quantization, tensors, files)
        layers, shapes = quantized.layers, quantized.shapes()
        kinds |= {name: layer.kind for name, layer in layers.items()}
    tensors.check(shapes)
    check_kinds(kinds, (*DTYPE_BYTES, *PACKED_AS))
    return DraftHeadHeader(tensors, header.kinds | kinds, layers)


def _reason(header: AnyHeader) -> str:
    """Return why no head is found."""
    is_file = isinstance(header, ModelHeader) and isinstance(header.files, GGUFFile)
    kind = "file" if is_file else "checkpoint"
    return f"the {kind} {header.name} has no head for multi-token prediction that can be read"
