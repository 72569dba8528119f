"""The resources that Triton's attention needs on each GPU, with the tiles that the host picks.

Spilled registers and narrow loads cost most of the speed of a kernel, and no test of its results
sees them. The limits hold for all versions of Triton. The recorded figures are those of one
version, and the figures of other versions are not compared with them. This records them again,
after a change of a kernel or of the version:

    python -m tests.unit.test_triton_resources
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.triton_code import (
    CAPABILITIES,
    MAX_SHARED_BYTES,
    KernelLaunch,
    KernelResources,
    recorded_calls,
    triton,
)
from worker.attention.base import AttentionBatch
from worker.attention.triton_paged import TritonPagedAttention
from worker.kernels.triton import attention as kernels

pytestmark = pytest.mark.long
GOLDEN = Path(__file__).parents[1] / "data" / "triton_resources.json"
RECORDED = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
SMALLEST_SHARED_BYTES = 99 << 10
"""Most shared memory of a block of threads with the capabilities 8.6 and 8.9, whose machine code is
that of 8.0."""

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {"heads": 32, "kv_heads": 8, "head_dim": 128},
    "SmolLM2": {"heads": 9, "kv_heads": 3, "head_dim": 64},
    "Gemma 2": {"heads": 8, "kv_heads": 4, "head_dim": 256, "soft_cap": 50.0, "window": 4096},
    "gpt-oss": {"heads": 64, "kv_heads": 8, "head_dim": 64, "sinks": True, "window": 128},
    "Phi-3": {"heads": 32, "kv_heads": 32, "head_dim": 96, "window": 2047, "block_tokens": 64},
    "Qwen3, short rows": {"heads": 32, "kv_heads": 8, "head_dim": 128, "prefill": (5, 9_000)},
    "float32": {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": torch.float32},
}
EVERYWHERE = ("Qwen3", "Gemma 2", "gpt-oss")
"""Models whose kernels are compiled for all capabilities. Those of others are compiled for 8.0,
where they need the most registers."""
KERNELS = ("decode", "prefill")
UPLOADED = {"table", "context_lens", "row_starts"}
"""Arguments that the host uploads for a step, side by side in one buffer."""


def launches(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    sinks: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    prefill: tuple[int, int] = (700, 700),
) -> list[KernelLaunch]:
    """Return the launches of a step with rows of both kinds. If the tokens and the context of the
    last row are `prefill`, its keys are split only if there are few tokens and many keys."""
    num_tokens = 2 + prefill[0]
    lens = torch.tensor([8_192, 4_000, prefill[1]])
    starts = torch.tensor([0, 1, 2, num_tokens])
    meta = torch.device("meta")
    batch = AttentionBatch(
        positions=torch.empty(num_tokens, dtype=torch.int64, device=meta),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=meta),
        row_starts=starts,
        context_lens=lens,
        block_table=torch.empty(3, 512, dtype=torch.int32, device=meta),
        num_decodes=2,
        device_row_starts=starts.to(meta, torch.int32),
        device_context_lens=lens.to(meta, torch.int32),
    )
    q = torch.empty(num_tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device=meta)[:, :heads]
    cache = torch.empty(2_048, block_tokens, kv_heads, head_dim, dtype=dtype, device=meta)
    attention = TritonPagedAttention(block_tokens, num_processors=132)
    with recorded_calls(kernels) as calls:
        attention.run(
            q,
            cache,
            cache,
            attention.plan(batch, window),
            soft_cap=soft_cap,
            sinks=torch.empty(heads, device=meta) if sinks else None,
        )
    return calls


def compiled(model: str, kernel: str, capability: int) -> KernelResources:
    launch = next(
        each for each in launches(**MODELS[model]) if each.kernel is getattr(kernels, kernel)
    )
    return launch.compile_for(capability)


def name_of(model: str, kernel: str, capability: int) -> str:
    return f"{kernel}, {model}, sm_{capability}"


CASES = [
    (model, kernel, capability)
    for model in MODELS
    for kernel in KERNELS
    for capability in (CAPABILITIES if model in EVERYWHERE else (80,))
]
CASES += [("Qwen3, short rows", "prefill", capability) for capability in CAPABILITIES[1:]]
CASES += [("Qwen3", "merge", capability) for capability in CAPABILITIES]


@pytest.mark.parametrize(("model", "kernel", "capability"), CASES)
def test_a_kernel_keeps_within_its_limits(model: str, kernel: str, capability: int) -> None:
    found = compiled(model, kernel, capability)
    assert found.stack_bytes == found.spill_stores == found.spill_loads == 0
    shared = SMALLEST_SHARED_BYTES if capability == 80 else MAX_SHARED_BYTES[capability]
    assert found.shared_bytes <= shared
    assert found.widest_load_bytes == 16
    assert found.narrowest_load_bytes == 4  # of the block table and the lengths
    if kernel != "merge":
        assert found.uses_tensor_cores
        # At least the first tiles of keys and of values, and one of each in the loop.
        assert found.loads[16] > found.loads[4]
    if RECORDED.get("triton") == triton.__version__:
        assert RECORDED[name_of(model, kernel, capability)] == as_json(found)


def as_json(found: KernelResources) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(found)))


def test_both_kinds_of_launches_are_compiled() -> None:
    def is_split(model: str) -> dict[str, bool]:
        calls = {each.kernel.fn.__name__: each.arguments for each in launches(**MODELS[model])}
        return {name: bool(calls[name]["IS_SPLIT"]) for name in KERNELS}

    assert is_split("Qwen3") == {"decode": True, "prefill": False}
    assert is_split("gpt-oss") == {"decode": False, "prefill": False}
    assert is_split("Qwen3, short rows") == {"decode": True, "prefill": True}


def test_each_kind_of_row_has_memory_for_its_own_tokens_and_splits() -> None:
    """So a long decode does not multiply the memory of a chunk."""
    decode, _, prefill, _ = launches(**MODELS["Qwen3, short rows"])
    assert decode.grid[1] > prefill.grid[1] > 1
    for launch, num_tokens in ((decode, 2), (prefill, 5)):
        assert launch.arguments["part_out"].shape == (num_tokens, 32, launch.grid[1], 128)
    decode, _, prefill = launches(**MODELS["Qwen3"])
    assert decode.arguments["part_out"].shape[0] == 2
    assert prefill.arguments["part_out"] is None


def test_no_kernel_is_compiled_again_because_of_where_an_upload_lies() -> None:
    for kernel in (kernels.decode, kernels.prefill):
        found = {each.name for each in kernel.params if each.do_not_specialize_on_alignment}
        assert found == UPLOADED & {*kernel.arg_names}


# ---- The limits can be exceeded.
def test_strides_that_are_not_multiples_of_16_make_loads_narrow() -> None:
    decode, *_ = launches(heads=4, kv_heads=2, head_dim=100)
    assert decode.compile_for(80).narrowest_load_bytes < 4


def test_tiles_that_are_too_large_make_registers_spill() -> None:
    decode, *_ = launches(heads=4, kv_heads=2, head_dim=128)
    arguments = {**decode.arguments, "TILE_QUERIES": 128, "TILE_KEYS": 128}
    found = KernelLaunch(decode.kernel, decode.grid, arguments).compile_for(80)
    assert found.stack_bytes > 0
    assert found.spill_stores > 0
    assert found.spill_loads > 0


def record() -> None:
    """Write the golden file again."""
    figures = {name_of(*case): as_json(compiled(*case)) for case in CASES}
    GOLDEN.write_text(json.dumps({"triton": triton.__version__, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    record()
