"""Chooses the type of each tensor in a quantised GGUF file, and quantises numbers to a type.

The rules of the mix Q4_K_M are those of llama_tensor_get_type in llama-quant.cpp of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType, quants
from numpy.typing import NDArray

from protocol.tools.quantize import TYPES
from worker.quantize.k_quants import q4_k, q5_k, q6_k

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
K_QUANTS: dict[Kind, Callable[[Floats], Bytes]] = {
    Kind.Q4_K: q4_k,
    Kind.Q5_K: q5_k,
    Kind.Q6_K: q6_k,
}
NARROWER = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}
"""K-quant -> the type used instead if the number of columns is not a multiple of 256."""
FILE_TYPES = {
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q5_0": LlamaFileType.MOSTLY_Q5_0,
    "Q5_1": LlamaFileType.MOSTLY_Q5_1,
    "Q4_K": LlamaFileType.MOSTLY_Q4_K_S,
    "Q5_K": LlamaFileType.MOSTLY_Q5_K_S,
    "Q6_K": LlamaFileType.MOSTLY_Q6_K,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
}
assert FILE_TYPES.keys() == set(TYPES)
DENSE = ("ffn_gate_inp", "position_embd")
"""Matrices that stay in float32: routers and tables of positions."""
LAYER = re.compile(r"blk\.(\d+)\.(.*)\.weight")


def tensor_kind(
    name: str, shape: tuple[int, ...], wanted: str, *, num_layers: int, num_experts: int, tied: bool
) -> Kind:
    """Return the number type in which a tensor is stored.

    name     name of the tensor in the GGUF file
    wanted   the file's type, one of TYPES
    tied     whether the embeddings are also the output head
    """
    if len(shape) < 2 or any(part in name for part in DENSE):
        return Kind.F32
    is_head = name == "output.weight" or (tied and name == "token_embd.weight")
    kind = Kind.Q4_K if wanted == "Q4_K_M" else Kind[wanted]
    if is_head and kind is not Kind.Q8_0:
        kind = Kind.Q6_K
    elif wanted == "Q4_K_M" and (found := LAYER.fullmatch(name)):
        kind = _mixed(found[2], int(found[1]), num_layers, num_experts)
    return _fitting(kind, shape[-1])


def _mixed(part: str, layer: int, num_layers: int, num_experts: int) -> Kind:
    """Return the type of a layer's matrix in the mix Q4_K_M."""
    if num_experts == 8 and part in ("attn_v", "attn_k"):
        return Kind.Q8_0
    if part == "attn_qkv":
        return Kind.Q5_K
    if part in ("attn_v", "ffn_down", "ffn_down_exps") and has_more_bits(layer, num_layers):
        return Kind.Q6_K
    return Kind.Q4_K


def has_more_bits(layer: int, num_layers: int) -> bool:
    """Return whether the mix Q4_K_M stores some matrices of this layer with more bits: the first
    and the last eighth of the layers, and every third one between them."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _fitting(kind: Kind, columns: int) -> Kind:
    if kind in NARROWER and columns % 256:
        kind = NARROWER[kind]
    return kind if columns % 32 == 0 else Kind.F16


def quantize(values: Floats, kind: Kind) -> Bytes:
    """Quantise numbers [rows, columns] to the type `kind`. Return uint8 [rows, bytes of a row]."""
    if kind in K_QUANTS:
        return K_QUANTS[kind](values.reshape(-1, 256)).reshape(len(values), -1)
    if kind in (Kind.F32, Kind.F16):
        plain = values.astype(np.float32 if kind is Kind.F32 else np.float16)
        return plain.view(np.uint8)
    # One long row is fast, because the package loops over rows in Python, 16 at a time.
    (row,) = quants.quantize(values.reshape(1, -1), kind)
    found: Bytes = np.asarray(row).view(np.uint8).reshape(len(values), -1)
    return found
