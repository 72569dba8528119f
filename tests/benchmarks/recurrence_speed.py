"""Measures one recurrent layer of a published shape: its recurrence, compiled and in torch.

    python -m tests.benchmarks.recurrence_speed delta
    python -m tests.benchmarks.recurrence_speed granite-tiny --kernels avx2 --weights BF16

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

from tests.support.kernels import native_kernels, randn, random_blocks
from tests.support.recurrent_steps import (
    RecurrentLayer,
    conv_layer,
    delta_layer,
    lru_layer,
    mamba1_layer,
    mamba_layer,
)
from worker.checkpoint.quant_blocks import BlockKind
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.kernels.packed import PackedLinear, PackedPart, pack
from worker.kernels.reference import TorchKernels
from worker.slots.states import Ints, StepStates
from worker.spec.recurrent import (
    GatedDeltaSpec,
    Mamba1Spec,
    Mamba2Spec,
    RecurrentSpec,
    RgLruSpec,
    ShortConvSpec,
)

LAYERS = {
    "delta": (5120, lambda: delta_layer(16, 48, 128, 128, 4)),
    "granite-tiny": (1536, lambda: mamba_layer(48, 64, 1, 128, 4)),
    "granite-small": (4096, lambda: mamba_layer(128, 64, 1, 128, 4)),
    "jamba-mini": (4096, lambda: mamba1_layer(8192, 16, 4)),
    "recurrentgemma-2b": (2560, lambda: lru_layer(10, 256, 4)),
    "lfm2": (2048, lambda: conv_layer(2048, 3)),
}
"""Hidden size and layer: of a hybrid of 27B weights with gated delta nets, of Granite 4 H Tiny and
Small, of Jamba Mini, of RecurrentGemma 2B, and of LFM2 1.2B."""
SLOTS = 32
STEPS = ((1, 1), (8, 1), (32, 1), (1, 64), (1, 512))
"""Rows of a step, and tokens of each."""
SECONDS = 8.0
"""Time for each kind of step."""

Part = Callable[[], object]


class RecurrentSteps:
    """Steps of `rows` rows with `tokens` tokens each."""

    def __init__(self, layer: RecurrentLayer, rows: int, tokens: int) -> None:
        self._layer = layer
        self._memory = torch.full((SLOTS, layer.spec.state_items), 0.01)
        self._inputs = layer.make_inputs(rows * tokens, 0)
        self._rows, self._tokens, self._slot = rows, tokens, 0

    def _slots(self) -> Ints:
        self._slot += self._rows
        return (np.arange(self._rows) + self._slot) % SLOTS

    def recurrence(self, kernels: Kernels) -> Tensor:
        counts, none = np.full(self._rows, self._tokens), np.empty(0, np.int64)
        slots, firsts = self._slots(), counts.cumsum() - counts
        saves = (none, none, none)
        rows = (slots, np.ones_like(slots), firsts, counts, counts)
        states = StepStates(self._memory, self._memory[:1], *rows, *saves)
        return self._layer.compute(kernels, self._inputs, states, 0)

    def one_pass(self) -> None:
        for slot in self._slots().tolist():
            self._memory[slot].mul_(1.0)


class Matrices:
    """The packed weights of the layer. `kind` is a type of GGUF's blocks, or "BF16"."""

    def __init__(self, kernels: NativeKernels, spec: RecurrentSpec, hidden: int, kind: str) -> None:
        def weights(outputs: int, inputs: int) -> PackedPart:
            if kind == "BF16":
                return randn(outputs, inputs, dtype=torch.bfloat16)
            return random_blocks(BlockKind[kind], outputs, inputs)

        def linear(outputs: int, inputs: int) -> PackedLinear:
            packed = pack(kernels, weights(outputs, inputs), rounds_inputs=kind != "BF16")
            return PackedLinear(kernels, packed)

        match spec:
            case GatedDeltaSpec():
                made = spec.conv_width + spec.value_width
            case Mamba1Spec():
                made = 2 * spec.channels
            case Mamba2Spec():
                made = spec.input_width
            case RgLruSpec():
                made = 2 * spec.width
            case ShortConvSpec():
                made = 3 * spec.width
        self._hidden, self._width = hidden, spec.output_width
        self._inputs, self._output = linear(made, hidden), linear(hidden, self._width)

    def __call__(self, tokens: int) -> Tensor:
        made = self._inputs(torch.ones(tokens, self._hidden, dtype=torch.bfloat16))
        return self._output(made[:, -self._width :].contiguous())


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
    parser.add_argument("layer", choices=LAYERS)
    parser.add_argument("--kernels", help="instruction set; by default the best one")
    parser.add_argument("--weights", default="Q8_0", help="of the matrices: Q8_0, BF16, ...")
    parser.add_argument("--no-torch", action="store_true", help="leave the recurrence in torch out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels = native_kernels(options.kernels)
    hidden, make = LAYERS[options.layer]
    layer = make()
    matrices = Matrices(kernels, layer.spec, hidden, options.weights)
    print(f"{layer}, {kernels.name}, matrices {options.weights}, ms")
    for rows, tokens in STEPS:
        steps = RecurrentSteps(layer, rows, tokens)
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
