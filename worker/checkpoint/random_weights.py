"""Random weights for the model that a config.json describes, to measure it without its files.

The time of a step does not depend on the weights, but a GPU that multiplies zeros takes less power
and runs faster. So weights are random, and of a size with which hidden states neither vanish nor
overflow.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from worker.checkpoint.quant_blocks import QuantBlocks
from worker.spec.tensor_names import ENDINGS


class RandomWeights:
    """A `WeightSource` (weights.py) that makes up each tensor on the target's device. A name always
    has the same tensor there.

    Matrices keep the variance of their inputs, and their numbers are those of bfloat16, as in most
    files. Norms multiply by 1, and all other vectors are 0.
    """

    def read_into(self, name: str, target: Tensor, index: int | None = None) -> None:
        if target.dim() == 1:
            target.fill_(1.0 if name.endswith(ENDINGS[0]) else 0.0)
            return
        gpus = [target.device] if target.device.type == "cuda" else []
        with torch.random.fork_rng(gpus):
            torch.manual_seed(zlib.crc32(f"{name} {index}".encode()))
            target.normal_(std=target.shape[-1] ** -0.5)
        target.copy_(target.bfloat16())

    def blocks(self, name: str, index: int | None = None) -> QuantBlocks | None:
        return None
