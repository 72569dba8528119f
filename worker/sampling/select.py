"""Chooses what samples tokens: Triton kernels on a GPU that can launch them, otherwise torch."""

from __future__ import annotations

import logging

import torch

from worker.kernels.triton_driver import reason_against_triton
from worker.sampling.base import Sampling
from worker.sampling.torch_sampling import TorchSampling

log = logging.getLogger(__name__)


def select_sampling(device: torch.device) -> Sampling:
    """Return the implementation of sampling for a device."""
    if device.type != "cuda":
        return TorchSampling()
    if reason := reason_against_triton():
        log.warning("sampling with torch, which has many more launches: %s", reason)
        return TorchSampling()
    from worker.sampling.triton_sampling import TritonSampling

    return TritonSampling()
