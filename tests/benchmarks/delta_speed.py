"""Measures one gated delta net of a hybrid of 27B weights: its recurrence, compiled and in torch.

    python -m tests.benchmarks.delta_speed
    python -m tests.benchmarks.delta_speed --kernels avx2 --weights BF16

Prints the least CPU time of one thread, in milliseconds, for steps with some rows and tokens. The
parts of a step are called in turns, because other programs slow them down. `pass` multiplies the
states by 1 in place, which reads and writes them once. `matrices` are the layer's inputs and output
as packed weights. Steps of one row change the state of another slot each time, so that states come
from memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tests.support.delta_steps import delta_inputs, delta_spec
from tests.support.kernels import native_kernels, randn, random_blocks
from worker.checkpoint.quant_blocks import BlockKind
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.kernels.packed import PackedLinear, PackedPart, pack
from worker.kernels.reference import TorchKernels
from worker.slots.states import Ints, StepStates

SPEC = delta_spec(16, 48, 128, 128, 4)
HIDDEN = 5120
SLOTS = 32
STEPS = ((1, 1), (8, 1), (32, 1), (1, 64), (1, 512))
"""Rows of a step, and tokens of each."""
SECONDS = 8.0
"""Time for each kind of step."""

Part = Callable[[], object]


class DeltaSteps:
    """Steps of `rows` rows with `tokens` tokens each."""

    def __init__(self, rows: int, tokens: int) -> None:
        self._memory = torch.full((SLOTS, SPEC.state_items), 0.01)
        self._inputs = delta_inputs(SPEC, rows * tokens)
        self._conv = randn(SPEC.kernel, SPEC.conv_width, dtype=torch.float32)
        self._rows, self._tokens, self._slot = rows, tokens, 0

    def _slots(self) -> Ints:
        self._slot += self._rows
        return (np.arange(self._rows) + self._slot) % SLOTS

    def recurrence(self, kernels: Kernels) -> Tensor:
        counts, none = np.full(self._rows, self._tokens), np.empty(0, np.int64)
        slots, firsts = self._slots(), counts.cumsum() - counts
        saves = (none, none, none)
        states = StepStates(self._memory, self._memory[:1], slots, firsts, counts, counts, *saves)
        return kernels.gated_delta(SPEC, self._conv, *self._inputs.all, states, 0)

    def one_pass(self) -> None:
        for slot in self._slots().tolist():
            self._memory[slot].mul_(1.0)


class Matrices:
    """The packed weights of the layer. `kind` is a type of GGUF's blocks, or "BF16"."""

    def __init__(self, kernels: NativeKernels, kind: str) -> None:
        def weights(outputs: int, inputs: int) -> PackedPart:
            if kind == "BF16":
                return randn(outputs, inputs, dtype=torch.bfloat16)
            return random_blocks(BlockKind[kind], outputs, inputs)

        def linear(outputs: int, inputs: int) -> PackedLinear:
            packed = pack(kernels, weights(outputs, inputs), rounds_inputs=kind != "BF16")
            return PackedLinear(kernels, packed)

        self._inputs = linear(SPEC.conv_width + SPEC.value_width, HIDDEN)
        self._output = linear(HIDDEN, SPEC.value_width)

    def __call__(self, tokens: int) -> Tensor:
        made = self._inputs(torch.ones(tokens, HIDDEN, dtype=torch.bfloat16))
        return self._output(made[:, -SPEC.value_width :].contiguous())


def least_ms(parts: dict[str, Part]) -> dict[str, float]:
    """Call the parts in turns. Return the least time of each."""
    least = dict.fromkeys(parts, float("inf"))
    end, rounds = time.perf_counter() + SECONDS, 0
    while time.perf_counter() < end or rounds < 3:
        for name, part in parts.items():
            start = time.process_time()
            part()
            least[name] = min(least[name], (time.process_time() - start) * 1e3)
        rounds += 1
    return least


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", help="instruction set; by default the best one")
    parser.add_argument("--weights", default="Q8_0", help="of the matrices: Q8_0, BF16, ...")
    parser.add_argument("--no-torch", action="store_true", help="leave the recurrence in torch out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels = native_kernels(options.kernels)
    matrices = Matrices(kernels, options.weights)
    print(f"{kernels.name}, matrices {options.weights}, ms")
    for rows, tokens in STEPS:
        steps = DeltaSteps(rows, tokens)
        parts: dict[str, Part] = {
            "compiled": partial(steps.recurrence, kernels),
            "torch": partial(steps.recurrence, TorchKernels()),
            "pass": steps.one_pass,
            "matrices": partial(matrices, rows * tokens),
        }
        if options.no_torch:
            del parts["torch"]
        times = "  ".join(f"{name} {ms:8.3f}" for name, ms in least_ms(parts).items())
        print(f"{rows:3} rows of {tokens:3} tokens:  {times}", flush=True)


if __name__ == "__main__":
    main()
