"""The resources of Triton's kernels between linears on each GPU, compiled as the host launches them
for some models.

These kernels are as fast as they move memory, so spilled registers and narrow loads cost most of
their speed, and no test of their results sees them. The limits hold for all versions of Triton. The
recorded figures are those of one version, and other versions are not compared with them. To record
them again, after a change of a kernel or of the version:

    python -m tests.unit.test_triton_layers_resources
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.triton_code import (
    CAPABILITIES,
    KernelLaunch,
    KernelResources,
    recorded_calls,
    triton,
)
from worker.kernels.gpu import TritonKernels
from worker.kernels.triton import layers
from worker.kv.cache import KVCache
from worker.layers.norm import Norm
from worker.spec.model_spec import Activation, MlpSpec, NormSpec

GOLDEN = Path(__file__).parents[1] / "data" / "triton_layers_resources.json"
RECORDED = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
META = torch.device("meta")
TOKENS = 3
WIDE_BYTES = 16
MAX_REGISTERS = 64
"""Registers of a thread with which a processor has room for 1,024 threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Dimensions of a model's layer. An offset also means that blocks have norms behind them."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    intermediate: int
    activation: Activation = "silu"
    qk_norm: bool = False
    offset: float = 0.0
    dtype: torch.dtype = torch.bfloat16


QWEN_3 = LayerShape(
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    width=128,
    intermediate=12_288,
    qk_norm=True,
)
SMOLLM_2 = LayerShape(hidden=576, heads=9, kv_heads=3, head_dim=64, width=64, intermediate=1536)
GEMMA_3 = LayerShape(
    hidden=3840,
    heads=16,
    kv_heads=8,
    head_dim=256,
    width=256,
    intermediate=15_360,
    activation="gelu_tanh",
    qk_norm=True,
    offset=1.0,
)
GPT_OSS = LayerShape(
    hidden=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    width=64,
    intermediate=2880,
    activation="clamped_swiglu",
)
PHI_4_MINI = LayerShape(
    hidden=3072, heads=24, kv_heads=8, head_dim=128, width=96, intermediate=8192
)
MODELS = {
    "Qwen3": QWEN_3,
    "SmolLM2": SMOLLM_2,
    "Gemma 3": GEMMA_3,
    "gpt-oss": GPT_OSS,
    "Phi-4-mini": PHI_4_MINI,
}


def launches(shape: LayerShape) -> list[KernelLaunch]:
    """Return the launches for a step's angles and for one operation of each kind in a layer."""
    kernels, dtype, head_dim = TritonKernels(), shape.dtype, shape.head_dim
    weight_dtype = torch.float32 if shape.offset else dtype

    def empty(*sizes: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=of, device=META)

    def norm(size: int) -> Norm:
        return Norm(NormSpec(eps=1e-6, offset=shape.offset), empty(size, of=weight_dtype))

    head_norm = norm(head_dim) if shape.qk_norm else None
    cache = KVCache(1, 8, 16, shape.kv_heads, head_dim, dtype, META)
    mlp = MlpSpec(intermediate=shape.intermediate, activation=shape.activation)
    with recorded_calls(layers) as calls:
        positions, inv_freq = empty(TOKENS, of=torch.int64), empty(shape.width // 2, of=torch.float)
        turn = kernels.cos_sin(positions, inv_freq, dtype, 1.0)
        kernels.add_norm(
            empty(TOKENS, shape.hidden),
            empty(TOKENS, shape.hidden),
            norm(shape.hidden),
            post_norm=norm(shape.hidden) if shape.offset else None,
        )
        qkv = empty(TOKENS, (shape.heads + 2 * shape.kv_heads) * head_dim)
        slots = empty(TOKENS, of=torch.int64)
        kernels.place(qkv, turn, cache, 0, slots, q_norm=head_norm, k_norm=head_norm)
        kernels.activate(empty(TOKENS, 2 * shape.intermediate), mlp)
    return calls


KERNELS = ("cos_sin", "add_norm", "place", "activate")
CASES = [("Qwen3", kernel, capability) for kernel in KERNELS for capability in CAPABILITIES]
CASES += [("SmolLM2", kernel, 90) for kernel in KERNELS[1:]]
CASES += [("Gemma 3", kernel, 90) for kernel in KERNELS[1:]]
CASES += [("gpt-oss", "activate", 90), ("Phi-4-mini", "place", 90)]


def launch_of(shape: LayerShape, kernel: str, **changes: int) -> KernelLaunch:
    (launch,) = (each for each in launches(shape) if each.kernel is getattr(layers, kernel))
    arguments = {"num_stages": 1, **launch.arguments, **changes}
    return KernelLaunch(launch.kernel, launch.grid, arguments)


def compiled(model: str, kernel: str, capability: int) -> KernelResources:
    return launch_of(MODELS[model], kernel).compile_for(capability)


def name_of(model: str, kernel: str, capability: int) -> str:
    return f"{kernel}, {model}, sm_{capability}"


def as_json(found: KernelResources) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(json.dumps(asdict(found)))
    return figures


@pytest.mark.long
@pytest.mark.parametrize(("model", "kernel", "capability"), CASES)
def test_a_kernel_keeps_within_its_limits(model: str, kernel: str, capability: int) -> None:
    found = compiled(model, kernel, capability)
    assert found.stack_bytes == found.spill_stores == found.spill_loads == 0
    assert found.registers <= MAX_REGISTERS
    if kernel != "cos_sin":
        assert found.widest_load_bytes == WIDE_BYTES
    if kernel in ("add_norm", "activate"):
        assert found.loads.keys() == found.stores.keys() == {WIDE_BYTES}
    if kernel == "place" and model in ("Qwen3", "SmolLM2"):
        assert found.loads.keys() == {WIDE_BYTES, 8}  # 8: the slot
        assert found.stores.keys() == {WIDE_BYTES}
    if RECORDED.get("triton") == triton.__version__:
        assert RECORDED[name_of(model, kernel, capability)] == as_json(found)


@pytest.mark.parametrize("model", MODELS)
def test_each_operation_is_one_launch(model: str) -> None:
    names = [launch.kernel.__name__ for launch in launches(MODELS[model])]
    assert names == list(KERNELS)


# ---- The limits can be exceeded.
def test_rows_of_an_odd_size_make_loads_narrow() -> None:
    found = launch_of(replace(SMOLLM_2, intermediate=1001), "activate").compile_for(90)
    assert found.widest_load_bytes < WIDE_BYTES


def test_a_row_that_is_too_long_for_one_warp_needs_more_registers() -> None:
    found = launch_of(GEMMA_3, "add_norm", num_warps=1).compile_for(90)
    assert found.registers > MAX_REGISTERS


def record() -> None:
    """Write the golden file again."""
    figures = {name_of(*case): as_json(compiled(*case)) for case in CASES}
    GOLDEN.write_text(json.dumps({"triton": triton.__version__, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    record()
