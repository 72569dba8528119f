"""Chooses what samples tokens: Triton kernels on a GPU that has Triton, otherwise torch."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from worker.sampling.base import Sampling
from worker.sampling.torch_sampling import TorchSampling

log = logging.getLogger(__name__)


def select_sampling(device: torch.device) -> Sampling:
    """Return the implementation of sampling for a device."""
    if device.type != "cuda":
        return TorchSampling()
    if find_spec("triton") is None:
        log.warning("sampling with torch, which is slower: Triton is not installed")
        return TorchSampling()
    from worker.sampling.triton_sampling import TritonSampling

    return TritonSampling()
