"""Golden numbers of the kernels: results of rounded inputs have the same bits on every instruction
set, whatever processor and compiler there is.

If a change of the kernels is meant to change bits, write the file anew and say so in the commit:

    python -m tests.unit.test_kernel_bits
"""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.kernels import NAMES, native_kernels, random_blocks
from tests.support.random_decoder import RandomBlocks, random_decoder
from tests.unit.test_whole_step import SPECS, results
from worker.checkpoint.quant_blocks import BlockKind
from worker.kernels.native import NativeKernels
from worker.kernels.packed import PackedLinear, pack
from worker.kv.rounding import ROUNDED

GOLDEN = Path(__file__).parents[1] / "data" / "kernel_bits.json"
FLOAT, BFLOAT16 = torch.float32, torch.bfloat16
OUTPUTS, INPUTS, ROWS = 70, 512, 13
SMALL = [kind for kind in BlockKind if kind.weights == 32]
"""Kinds of blocks that fit the narrow decoders."""
STEPS = [
    (name, kind, kv_dtype)
    for (name, kind), kv_dtype in zip(
        zip(SPECS, cycle(SMALL), strict=False), cycle([BFLOAT16, FLOAT, ROUNDED])
    )
]


class IntegerBlocks(RandomBlocks):
    """A source whose other tensors are made of integers. torch.randn returns other bits on ARM."""

    def drawn(self, shape: torch.Size, seed: int) -> Tensor:
        random = np.random.Generator(np.random.PCG64(seed))
        return torch.from_numpy(random.integers(-32, 33, tuple(shape))).float() / 19


def numbers(*shape: int) -> Tensor:
    """Return numbers of several sizes, made of integers: no function of a library takes part."""
    random = np.random.Generator(np.random.PCG64(5))
    integers = random.integers(-4096, 4096, shape) * (1 << random.integers(0, 6, shape))
    return torch.from_numpy(integers).float() / 65536


def digest(found: list[Tensor]) -> str:
    """Return the digest of the bits of some tensors."""
    raw = b"".join(each.contiguous().numpy().tobytes() for each in found)
    return sha256(raw).hexdigest()[:16]


def linear_digest(native: NativeKernels, kind: BlockKind) -> str:
    """Return the digest of a linear's results, of one row and of many."""
    blocks = random_blocks(kind, OUTPUTS, INPUTS)
    linear, x = (
        PackedLinear(native, pack(native, blocks, rounds_inputs=True)),
        numbers(ROWS, INPUTS),
    )
    return digest([linear.to_float(x), linear.to_float(x[:1])])


def step_digest(native: NativeKernels, spec: str, kind: BlockKind, kv_dtype: torch.dtype) -> str:
    """Return the digest of the logits of two steps, and of the keys and values."""
    model = random_decoder(SPECS[spec], native, FLOAT, kind, source=IntegerBlocks)
    assert model.whole is not None
    return digest(results(model, FLOAT, kv_dtype))


def digests(native: NativeKernels) -> dict[str, str]:
    linears = {f"linear of {kind.name}": linear_digest(native, kind) for kind in BlockKind}
    steps = {f"step: {each[0]}": step_digest(native, *each) for each in STEPS}
    return linears | steps


@pytest.mark.parametrize("name", NAMES)
def test_results_of_rounded_inputs_are_the_golden_ones(name: str) -> None:
    assert digests(native_kernels(name)) == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_results_depend_on_the_inputs_and_the_weights(name: str) -> None:
    """Digests of results that are all alike, such as NaN, would prove nothing."""
    found = digests(native_kernels(name))
    assert len(set(found.values())) == len(found)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(digests(native_kernels()), indent=2) + "\n")
