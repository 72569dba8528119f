"""Writes checkpoints whose layers are quantised, in the formats GPTQ, AWQ, compressed-tensors and
FP8.

The writers pack integers one bit field after the other, as the formats define it. They also return
the numbers that the integers stand for, which are the oracle for our reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import write_directory

Floats = NDArray[np.float32]
Written = tuple[dict[str, Tensor], Floats]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Position in an int32 word of AWQ -> which of eight neighbouring integers is stored there."""


@dataclass(frozen=True)
class QuantFormat:
    """A format of quantised weights in safetensors, with its `quantization_config`.

    write   returns a weight's tensors by the last part of their names, and its dequantised numbers
    kind    the number type of such a weight in a `ModelHeader`
    """

    config: dict[str, Any]
    write: Callable[[Floats], Written]
    kind: str


@dataclass(frozen=True)
class Integers:
    """A quantised matrix: unsigned integers [rows, columns], scales and zero points [rows, G], and
    the group of each column [columns]."""

    codes: NDArray[np.int64]
    scales: Floats
    zeros: NDArray[np.int64]
    group_of: NDArray[np.int64]

    def numbers(self) -> Floats:
        zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
        return ((self.codes - zeros) * scales).astype(np.float32)


def quantized(
    weight: Floats,
    bits: int,
    group: int,
    *,
    is_symmetric: bool,
    dtype: torch.dtype = torch.float16,
    shuffles: bool = False,
) -> Integers:
    """Quantise `weight` by rounding to the nearest, in groups of columns.

    dtype      of the scales
    shuffles   give the columns to the groups at random, as GPTQ does with desc_act
    """
    rows, columns = weight.shape
    group = columns if group == -1 else group
    group_of = np.arange(columns) // group
    if shuffles:
        group_of = np.random.default_rng(columns).permutation(group_of)
    top = (1 << bits) - 1
    num_groups = int(group_of.max()) + 1
    scales, zeros = np.empty((rows, num_groups)), np.empty((rows, num_groups), np.int64)
    for index in range(num_groups):
        part = weight[:, group_of == index]
        if is_symmetric:
            scales[:, index], zeros[:, index] = 2 * np.abs(part).max(axis=1) / top, (top + 1) // 2
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scales[:, index] = (high - low) / top
            zeros[:, index] = np.clip(np.rint(-low / scales[:, index]), 1, top)
    rounded = torch.from_numpy(scales).to(dtype).float().numpy()
    multiples = np.rint(weight / rounded[:, group_of]).astype(np.int64)
    return Integers(np.clip(multiples + zeros[:, group_of], 0, top), rounded, zeros, group_of)


def packed(integers: NDArray[np.int64], bits: int, axis: int) -> Tensor:
    """Return int32 words that each hold `32 / bits` neighbours along `axis`, the first in the
    lowest bits."""
    lines = np.moveaxis(integers, axis, -1)
    per_word = 32 // bits
    words = np.zeros((*lines.shape[:-1], -(-lines.shape[-1] // per_word)), np.int64)
    for index in range(lines.shape[-1]):
        words[..., index // per_word] |= lines[..., index] << bits * (index % per_word)
    whole = np.moveaxis(words, -1, axis).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(whole))


def gptq(
    bits: int, group: int, *, v2: bool = False, sym: bool = True, desc_act: bool = False
) -> QuantFormat:
    def write(weight: Floats) -> Written:
        found = quantized(weight, bits, group, is_symmetric=sym, shuffles=desc_act)
        return {
            "qweight": packed(found.codes.T, bits, 0),
            "qzeros": packed(found.zeros.T - (0 if v2 else 1), bits, 1),
            "scales": torch.from_numpy(found.scales.T.copy()).half(),
            "g_idx": torch.from_numpy(found.group_of.astype(np.int32)),
        }, found.numbers()

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym}
    config |= {"desc_act": desc_act, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    config |= {"damp_percent": 0.01, "true_sequential": True}
    kind = "INT8" if bits == 8 else "INT4 in any order" if desc_act else "INT4"
    return QuantFormat(config, write, kind)


def awq(group: int) -> QuantFormat:
    def write(weight: Floats) -> Written:
        found = quantized(weight, 4, group, is_symmetric=False)

        def interleaved(integers: NDArray[np.int64]) -> Tensor:
            eights = integers.reshape(len(integers), -1, 8)[:, :, AWQ_COLUMNS]
            return packed(eights.reshape(integers.shape), 4, 1)

        return {
            "qweight": interleaved(found.codes.T),
            "qzeros": interleaved(found.zeros.T),
            "scales": torch.from_numpy(found.scales.T.copy()).half(),
        }, found.numbers()

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return QuantFormat(config | {"version": "gemm"}, write, "INT4")


def compressed(form: str, weights: Mapping[str, Any], **group: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None, **group}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme | {"output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def pack_quantized(bits: int, group: int, *, symmetric: bool) -> QuantFormat:
    def write(weight: Floats) -> Written:
        found = quantized(weight, bits, group, is_symmetric=symmetric, dtype=torch.bfloat16)
        tensors = {
            "weight_packed": packed(found.codes, bits, 1),
            "weight_scale": torch.from_numpy(found.scales).bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(found.zeros, bits, 0)
        return tensors, found.numbers()

    strategy = {"strategy": "channel"}
    if group != -1:
        strategy = {"strategy": "group", "group_size": group}  # type: ignore[dict-item]
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    config = compressed("pack-quantized", weights | strategy | {"observer": "minmax"})
    return QuantFormat(config, write, f"INT{bits}")


def int_quantized(*, symmetric: bool) -> QuantFormat:
    def write(weight: Floats) -> Written:
        found = quantized(weight, 8, -1, is_symmetric=symmetric, dtype=torch.bfloat16)
        tensors = {
            "weight": torch.from_numpy((found.codes - 128).astype(np.int8)),
            "weight_scale": torch.from_numpy(found.scales).bfloat16(),
        }
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy((found.zeros - 128).astype(np.int8))
        return tensors, found.numbers()

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True}
    config = compressed("int-quantized", weights, input_activations=activations)
    return QuantFormat(config, write, "INT8")


def floats(weight: Floats, by_number: Tensor) -> tuple[Tensor, Floats]:
    """Return (float8 numbers, the numbers that they stand for). `by_number` has a scale for each
    number."""
    codes = (torch.from_numpy(weight) / by_number).to(torch.float8_e4m3fn)
    return codes, (codes.float() * by_number).numpy()


def fp8(
    block: int | None, end: str = "weight_scale_inv", *, is_static: bool = False
) -> QuantFormat:
    def write(weight: Floats) -> Written:
        rows, columns = weight.shape
        size = block or max(rows, columns)
        parts = [
            [
                np.abs(weight[i : i + size, j : j + size]).max() / 448
                for j in range(0, columns, size)
            ]
            for i in range(0, rows, size)
        ]
        scales = torch.tensor(np.array(parts), dtype=torch.float32)
        by_number = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)[:rows, :columns]
        codes, numbers = floats(weight, by_number)
        tensors = {"weight": codes, end: scales if block else scales.reshape(())}
        return tensors | ({"input_scale": torch.ones(())} if is_static else {}), numbers

    config = {"quant_method": "fp8", "activation_scheme": "static" if is_static else "dynamic"}
    extra = {"weight_block_size": [block, block], "fmt": "e4m3"} if block else {}
    return QuantFormat(config | extra, write, "FP8")  # type: ignore[arg-type]


def float_quantized() -> QuantFormat:
    def write(weight: Floats) -> Written:
        scales = torch.from_numpy(np.abs(weight).max(axis=1, keepdims=True) / 448).bfloat16()
        codes, numbers = floats(weight, scales.float())
        return {"weight": codes, "weight_scale": scales}, numbers

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    config = compressed("float-quantized", weights, input_activations=activations)
    return QuantFormat(config, write, "FP8")


FORMATS: dict[str, QuantFormat] = {
    "gptq 4 bits": gptq(4, 32),
    "gptq 4 bits, v2, asymmetric": gptq(4, 64, v2=True, sym=False),
    "gptq 4 bits, asymmetric": gptq(4, 128, sym=False),
    "gptq 4 bits, desc_act": gptq(4, 32, desc_act=True),
    "gptq 8 bits": gptq(8, -1),
    "gptq 8 bits, asymmetric": gptq(8, 32, sym=False),
    "awq": awq(32),
    "fp8 blocks": fp8(128),
    "fp8 tensors": fp8(None, "weight_scale", is_static=True),
    "packed 4 bits": pack_quantized(4, 32, symmetric=True),
    "packed 4 bits, asymmetric": pack_quantized(4, -1, symmetric=False),
    "packed 8 bits": pack_quantized(8, 32, symmetric=True),
    "int8": int_quantized(symmetric=True),
    "int8, asymmetric": int_quantized(symmetric=False),
    "float8": float_quantized(),
}


NOT_QUANTIZED = (
    *("embed", "lm_head", ".gate.", "correction_bias", "A_log", "gate_bias", "weights_proj"),
)
"""Parts of the names of matrices that are no layers, or stay as they are."""


def write_quantized(path: Path, model: Any, form: QuantFormat) -> tuple[Path, Path]:
    """Write a model twice: with its layers quantised, and with the numbers that the quantised
    layers stand for. Embeddings, the head and routers stay as they are. Return both directories,
    the quantised one first."""
    return quantized_copies(write_directory(path / "plain", model), path, form)


def quantized_copies(
    plain: Path, path: Path, form: QuantFormat, *, only: str = ""
) -> tuple[Path, Path]:
    """Write copies of the directory `plain` to the directory `path`, as `write_quantized` does.

    only   part of the names of the matrices that are quantised
    """
    ours, dense = path / "quantized", path / "dense"
    for each in (ours, dense):
        copytree(plain, each)
    weights = load_file(ours / "model.safetensors")
    stored, numbers = {}, {}
    for name, tensor in weights.items():
        is_matrix = tensor.ndim == 2 and only in name
        if not is_matrix or any(part in name for part in NOT_QUANTIZED):
            stored[name] = numbers[name] = tensor
            continue
        parts, values = form.write(tensor.float().numpy())
        stored |= {f"{name.removesuffix('.weight')}.{end}": part for end, part in parts.items()}
        numbers[name] = torch.from_numpy(values)
    save_file(stored, ours / "model.safetensors", {"format": "pt"})
    save_file(numbers, dense / "model.safetensors", {"format": "pt"})
    change_config(ours, form.config)
    return ours, dense


def change_config(path: Path, quantization: Mapping[str, Any]) -> None:
    """Set the `quantization_config` of a directory."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
