"""Writes a quantised GGUF file: header first, then tensor by tensor.

The header is read back with our reader before any tensor is quantised, so a model that a GGUF file
cannot store is refused at once. The file has a temporary name until it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quant_shape_to_byte_shape
from numpy.typing import NDArray

from protocol.tools.start_facts import GIB
from worker.checkpoint.gguf_config import ROPE_FREQS
from worker.checkpoint.gguf_families import FAMILIES
from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.gguf_header import architecture_names, gguf_names, gguf_spec
from worker.checkpoint.safetensors_files import SafetensorsFiles
from worker.errors import UnusableModel
from worker.layers.rope import inverse_frequencies
from worker.loading.decoder import open_weights
from worker.loading.header import ModelHeader, read_header
from worker.loading.layouts import WeightSource
from worker.quantize.metadata import architecture_of, check_spec, metadata, rope_of
from worker.quantize.tensors import OutputTensor, output_tensors
from worker.quantize.tokens import tokenizer_metadata
from worker.quantize.types import FILE_TYPES, quantize, tensor_kind
from worker.spec.model_spec import ModelSpec
from worker.spec.rope_config import RopeConfig
from worker.spec.tensors import ModelTensors

PIECE_ITEMS = 1 << 18
QUANTIZATION_VERSION = 2
Kinds = dict[str, GGMLQuantizationType]
Report = Callable[[str, int, int], None]
"""Called after each tensor with its name, the bytes written, and the bytes of all tensors."""
Contents = Callable[[OutputTensor, GGMLQuantizationType], NDArray[np.uint8]]
"""Returns the bytes of a tensor, quantised to a type."""


def quantize_model(model: Path, output: Path, wanted: str, report: Report) -> None:
    """Write the safetensors model in a directory as a GGUF file of type `wanted`.

    `report` is called after each tensor. Raises UnusableModel if the model cannot be read, if a
    GGUF file cannot store the model or its tokenizer, or if the file would not fit on the disk.
    Raises OSError if the file cannot be written.
    """
    header = read_header(model)
    if not isinstance(header, ModelHeader) or not isinstance(header.files, SafetensorsFiles):
        raise UnusableModel(f"{model} is not a directory of safetensors of a supported family")
    write_model(header, quantized_weights(open_weights(header)), output, wanted, report)


def write_model(
    header: ModelHeader, contents: Contents, output: Path, wanted: str, report: Report
) -> None:
    """Write the model with this header. `contents` returns the bytes of each tensor.

    Raises UnusableModel if a GGUF file cannot store the model or would not fit on the disk, and
    OSError if the file cannot be written.
    """
    spec = header.spec
    architecture = architecture_of(spec)
    gguf = ModelTensors(spec, architecture_names(architecture, spec))
    offset = spec.norm.offset if FAMILIES[architecture].has_whole_norms else 0.0
    tensors = output_tensors(header.tensors, gguf, offset=offset)
    experts = max(mlp.num_experts for mlp in spec.mlps)
    kinds = {
        tensor.name: tensor_kind(
            tensor.name,
            tensor.shape,
            wanted,
            num_layers=spec.num_layers,
            num_experts=experts,
            tied=spec.tied_embeddings,
        )
        for tensor in tensors
    }
    partial = output.with_name(f"{output.name}.partial")
    writer = _header_writer(partial, header, architecture, wanted)
    try:
        rope = rope_of(spec)
        total = _announce(writer, tensors, kinds, rope)
        _check_room(output.parent, total)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _check_header(writer, partial, total, spec)
        if rope is not None:
            writer.write_tensor_data(_factors(rope))
        done = 0
        for tensor in tensors:
            raw = contents(tensor, kinds[tensor.name])
            writer.write_tensor_data(raw)
            done += raw.nbytes
            report(tensor.name, done, total)
        writer.close()
        os.replace(partial, output)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def _header_writer(path: Path, header: ModelHeader, architecture: str, wanted: str) -> GGUFWriter:
    writer = GGUFWriter(path, architecture)
    writer.add_name(header.name)
    writer.add_file_type(FILE_TYPES[wanted])
    writer.add_quantization_version(QUANTIZATION_VERSION)
    values = metadata(header.spec, architecture)
    found = {f"{architecture}.{name}": value for name, value in values.items()}
    for name, value in (found | tokenizer_metadata(header.text, header.spec.vocab_size)).items():
        _add(writer, name, value)
    return writer


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)


def _announce(
    writer: GGUFWriter, tensors: list[OutputTensor], kinds: Kinds, rope: RopeConfig | None
) -> int:
    """Add the tensor table, and return the total bytes of `tensors`. The factors of the rotary
    frequencies are in the table, but not in the total."""
    total = 0
    if rope is not None:
        values = _factors(rope)
        writer.add_tensor_info(ROPE_FREQS, values.shape, values.dtype, values.nbytes)
    for tensor in tensors:
        kind = kinds[tensor.name]
        shape = quant_shape_to_byte_shape(tensor.shape, kind)
        size = int(np.prod(shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), size, raw_dtype=kind)
        total += size
    return total


def _factors(rope: RopeConfig) -> NDArray[np.float32]:
    """Return the factors by which the frequencies of unscaled rotary embeddings are divided."""
    plain = inverse_frequencies(RopeConfig(rope.width, rope.theta))
    factors: NDArray[np.float32] = (plain / inverse_frequencies(rope)).numpy()
    return factors


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UnusableModel(
            f"the file needs {needed / GIB:.2f} GiB; {free / GIB:.2f} are free in {folder}",
            remedy="free disk space, or choose a smaller --type",
        )


def _check_header(writer: GGUFWriter, path: Path, total: int, spec: ModelSpec) -> None:
    """Raise UnusableModel if our reader finds another model than `spec` in the header.

    For the check, the file is made at least as long as it will be, because readers compare its
    length with the tensor table. That uses no disk space, and is undone.
    """
    writer.flush()
    size = path.stat().st_size
    padding = len(writer.tensors[0]) * writer.data_alignment
    os.truncate(path, size + total + padding + (1 << 16))
    file = GGUFFile(path)
    found = gguf_spec(file)
    check_spec(spec, found, FAMILIES[file.metadata["general.architecture"]])
    shapes = {name: info.shape for name, info in file.tensors.items()}
    ModelTensors(found, gguf_names(file, found)).check(shapes)
    os.truncate(path, size)


def quantized_weights(source: WeightSource) -> Contents:
    """Return a function that reads a tensor from `source` and returns its bytes in a type.

    The function raises UnusableModel for a tensor with a number that is not finite.
    """

    def content(tensor: OutputTensor, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
        raw: list[NDArray[np.uint8]] = []
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool, torch.inference_mode():
            for values in tensor.read(source):
                if not bool(torch.isfinite(values).all()):
                    raise UnusableModel(f"{tensor.parts[0][0]} has numbers that are not finite")
                rows = values.reshape(-1, values.shape[-1]).numpy()
                raw += pool.map(lambda piece: quantize(piece, kind), _pieces(rows))
        return np.concatenate(raw)

    return content


def _pieces(rows: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    step = max(PIECE_ITEMS // rows.shape[1], 1)
    for first in range(0, len(rows), step):
        yield rows[first : first + step]
