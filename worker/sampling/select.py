"""Chooses what samples tokens: Triton kernels if the model computes with them, otherwise torch."""

from __future__ import annotations

from worker.kernels.base import Kernels
from worker.sampling.base import Sampling
from worker.sampling.torch_sampling import TorchSampling


def select_sampling(kernels: Kernels) -> Sampling:
    """Return the implementation of sampling that belongs to a model's kernels."""
    if kernels.name != "triton":
        return TorchSampling()
    # Triton takes a second to import, and is not needed on a CPU.
    from worker.sampling.triton_sampling import TritonSampling

    return TritonSampling()
