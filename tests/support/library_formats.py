"""Writes the quantised matrices in tests/data/quantized.

The library that defines a format quantises the matrices, stores them and reads them back. So our
reader is compared with numbers that do not come from our code.

    python -m tests.support.library_formats tests/data/quantized

The program needs the packages transformers, compressed-tensors and gptqmodel. Our tests do not need
the last two. Each file has the tensors of one layer as in a checkpoint of the library, the numbers
[ROWS, COLUMNS] that the library reads from them (EXPECTED), and in its metadata the library's
`quantization_config`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ROWS, COLUMNS = 32, 64
EXPECTED = "expected"
Made = tuple[dict[str, Tensor], Tensor, dict[str, Any], str]
"""Tensors of a layer, the numbers that the library reads, its config, and the library's name."""


def numbers(*, positive_groups: bool = False) -> Tensor:
    """Return numbers [ROWS, COLUMNS] of different sizes. With `positive_groups`, the first columns
    of some rows are above zero, so the zero point of such a group is zero."""
    generator = torch.Generator().manual_seed(ROWS)
    found = torch.randn(ROWS, COLUMNS, generator=generator)
    found *= torch.rand(ROWS, 1, generator=generator) + 0.1
    if positive_groups:
        found[::3, : COLUMNS // 2] = found[::3, : COLUMNS // 2].abs() + 0.01
    return found


def gptq(bits: int, group: int, *, sym: bool, desc_act: bool = False, v2: bool = False) -> Made:
    from gptqmodel import QuantizeConfig  # type: ignore[import-not-found]
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # type: ignore[import-not-found]
    from gptqmodel.quantization import FORMAT  # type: ignore[import-not-found]
    from gptqmodel.quantization.quantizer import Quantizer  # type: ignore[import-not-found]
    from gptqmodel.utils.model import (  # type: ignore[import-not-found]
        convert_gptq_v2_to_v1_format_module,
    )

    form = FORMAT.GPTQ_V2 if v2 else FORMAT.GPTQ
    config = QuantizeConfig(bits=bits, group_size=group, sym=sym, desc_act=desc_act, format=form)
    weight, size = numbers(positive_groups=not sym), COLUMNS if group == -1 else group
    groups = torch.arange(COLUMNS) // size
    if desc_act:
        groups = groups[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]
    scales, zeros = [], []
    for index in range(int(groups.max()) + 1):
        quantizer = Quantizer(config)
        quantizer.configure(perchannel=True)
        quantizer.find_params(weight[:, groups == index], weight=True)
        scales.append(quantizer.scale)
        zeros.append(quantizer.zero)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = weight
    layer = TorchLinear(bits, group, sym, desc_act, COLUMNS, ROWS)
    layer.pack_original(linear, torch.cat(scales, 1), torch.cat(zeros, 1), groups.int())
    layer.eval()
    stored = {name: getattr(layer, name).clone() for name in ("qweight", "scales", "g_idx")}
    whole = layer.scales[groups].float()  # the library multiplies in float16
    ones = torch.ones_like(layer.scales)
    layer.scales = ones
    expected = layer.dequantize_weight().float() * whole
    if not v2:
        convert_gptq_v2_to_v1_format_module(layer, config)
    stored["qzeros"] = layer.qzeros.clone()
    return stored, expected.T.contiguous(), config.to_dict(), "gptqmodel"


def awq(*, sym: bool) -> Made:
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch_awq import (  # type: ignore[import-not-found]
        AwqTorchLinear,
    )
    from gptqmodel.quantization import FORMAT, METHOD
    from gptqmodel.quantization.awq.utils.packing_utils import (  # type: ignore[import-not-found]
        dequantize_gemm,
    )

    group = 32
    config = QuantizeConfig(
        method=METHOD.AWQ, format=FORMAT.GEMM, bits=4, group_size=group, sym=sym
    )
    weight = numbers(positive_groups=not sym)
    parts = weight.reshape(ROWS, -1, group)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    if sym:
        scales, zeros = parts.abs().amax(2) / 7, torch.full_like(low, 8)
    else:
        scales = (high - low) / 15
        zeros = (-low / scales).round().clamp(0, 15)
    scales = scales.half().float()
    per_column = [each.repeat_interleave(group, 1) for each in (scales, zeros)]
    codes = (weight / per_column[0] + per_column[1]).round().clamp(0, 15)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = (codes - per_column[1]) * per_column[0]
    layer = AwqTorchLinear(4, group, sym, False, COLUMNS, ROWS, register_buffers=True)
    layer.pack(linear, scales, zeros)
    stored = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales")}
    stored["scales"] = stored["scales"].half()
    expected = dequantize_gemm(stored["qweight"], stored["qzeros"], scales.T, 4, group)
    return stored, expected.T.contiguous(), config.to_dict(), "gptqmodel"


def compressed(form: str, *, static_input: bool = False, **weights: Any) -> Made:
    from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-not-found]
    from compressed_tensors.quantization import (  # type: ignore[import-not-found]
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )
    from compressed_tensors.quantization.utils import (  # type: ignore[import-not-found]
        calculate_qparams,
    )

    arguments = QuantizationArgs(**weights)
    inputs = QuantizationArgs(num_bits=8, type=arguments.type, dynamic=not static_input)
    is_packed = form == "pack-quantized"
    scheme = QuantizationScheme(
        targets=["Linear"], weights=arguments, input_activations=None if is_packed else inputs
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, ignore=["lm_head"]
    ).to_dict()
    weight = numbers(positive_groups=not arguments.symmetric)
    rows, columns = {
        "tensor": (ROWS, COLUMNS),
        "channel": (1, COLUMNS),
        "group": (1, arguments.group_size),
        "block": arguments.block_structure,
    }[arguments.strategy]
    parts = [[part for part in line.split(columns, 1)] for line in weight.split(rows)]
    low, high = (
        torch.tensor([[float(find(part)) for part in line] for line in parts])
        for find in (torch.min, torch.max)
    )
    scale, zero = calculate_qparams(low, high, arguments)
    if arguments.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    scale = scale.bfloat16()
    compressor = BaseCompressor.get_value_from_registry(form)
    state = {"weight": weight, "weight_scale": scale.float(), "weight_zero_point": zero}
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"].float()
    stored["weight_scale"] = scale
    if static_input:
        stored["input_scale"] = torch.ones(1)
    config["quantization_status"] = "compressed"
    return stored, expected, config, "compressed-tensors"


def fp8(**settings: Any) -> Made:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    class Quantizer:
        quantization_config = FineGrainedFP8Config(**settings)

    weight: Any = {"weight": numbers()}
    found = Fp8Quantize(Quantizer()).convert(weight)
    scales = found["weight_scale_inv"]
    pair: Any = {"weight": found["weight"], "weight_scale_inv": scales.float()}
    expected: Any = Fp8Dequantize(Quantizer()).convert(pair)["weight"]
    config = Quantizer.quantization_config.to_dict()
    return found, expected.float(), config, "transformers"


def packed(bits: int, group: int = 0, *, symmetric: bool = True) -> Made:
    shape: dict[str, Any] = {"strategy": "group", "group_size": group} if group else {}
    shape = shape or {"strategy": "channel"}
    return compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **shape)


def float8(strategy: str, **weights: Any) -> Made:
    weights |= {"num_bits": 8, "type": "float", "strategy": strategy}
    return compressed("float-quantized", static_input=strategy == "tensor", **weights)


def int8(form: str, strategy: str, **weights: Any) -> Made:
    return compressed(form, num_bits=8, strategy=strategy, **weights)


FORMATS: dict[str, Callable[[], Made]] = {
    "gptq_4": lambda: gptq(4, 32, sym=True),
    "gptq_4_asymmetric": lambda: gptq(4, 32, sym=False),
    "gptq_4_v2_asymmetric": lambda: gptq(4, 32, sym=False, v2=True),
    "gptq_4_desc_act": lambda: gptq(4, 16, sym=False, desc_act=True),
    "gptq_8": lambda: gptq(8, -1, sym=True),
    "gptq_8_asymmetric": lambda: gptq(8, 32, sym=False),
    "awq": lambda: awq(sym=False),
    "awq_symmetric": lambda: awq(sym=True),
    "packed_4": lambda: packed(4, 32),
    "packed_4_asymmetric": lambda: packed(4, 16, symmetric=False),
    "packed_8_asymmetric": lambda: packed(8, symmetric=False),
    "int8": lambda: int8("int-quantized", "channel"),
    "int8_asymmetric": lambda: int8("int-quantized", "group", group_size=32, symmetric=False),
    "naive_int8": lambda: int8("naive-quantized", "tensor"),
    "float8_tensor": lambda: float8("tensor"),
    "float8_channel": lambda: float8("channel"),
    "float8_block": lambda: float8("block", block_structure=[24, 40]),
    "fp8_blocks": lambda: fp8(weight_block_size=(16, 32)),
    "fp8_blocks_ue8m0": lambda: fp8(weight_block_size=(16, 32), scale_fmt="ue8m0"),
    "fp8_tensor": lambda: fp8(weight_block_size=None),
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in FORMATS.items():
        stored, expected, config, library = make()
        metadata = {
            "made_by": f"{library} {version(library)}",
            "quantization_config": json.dumps(config),
        }
        tensors = {end: tensor.contiguous() for end, tensor in stored.items()}
        save_file(
            tensors | {EXPECTED: expected.contiguous()}, folder / f"{name}.safetensors", metadata
        )
        print(f"{name:24} {sorted(tensors)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
