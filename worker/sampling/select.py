"""Chooses what samples tokens: the kernels that the model computes with, or torch."""

from __future__ import annotations

from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.sampling.base import Sampling
from worker.sampling.native_sampling import NativeSampling
from worker.sampling.torch_sampling import TorchSampling


def select_sampling(kernels: Kernels) -> Sampling:
    """Return the implementation of sampling that belongs to a model's kernels."""
    if isinstance(kernels, NativeKernels):
        return NativeSampling(kernels)
    if kernels.name != "triton":
        return TorchSampling()
    # Triton takes a second to import, and is not needed on a CPU.
    from worker.sampling.triton_sampling import TritonSampling

    return TritonSampling()
