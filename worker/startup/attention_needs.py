"""Describes a GPU, and the attention that a model needs of it, for the choice of a backend."""

from __future__ import annotations

import re

import torch

from worker.attention.limits import HEAD_DIM_MULTIPLE, AttentionNeeds
from worker.spec.architectures import TransformersSpec
from worker.spec.model_spec import ModelSpec


def attention_needs(
    spec: ModelSpec | TransformersSpec,
    device: torch.device,
    *,
    block_tokens: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> AttentionNeeds | None:
    """Return what a backend must support to compute the model's attention on `device`. Return None
    for the CPU.

    kv_dtype   dtype of the K/V cache
    """
    if device.type == "cpu":
        return None
    is_rocm = torch.version.hip is not None
    num_heads, has_sinks, has_soft_cap = _facts(spec)
    return AttentionNeeds(
        platform="rocm" if is_rocm else "cuda",
        capability=(0, 0) if is_rocm else torch.cuda.get_device_capability(device),
        num_processors=torch.cuda.get_device_properties(device).multi_processor_count,
        torch_version=version_of(torch.__version__),
        dtype=name_of(dtype),
        kv_dtype=name_of(kv_dtype),
        num_heads=num_heads,
        # One backend computes all layers. Unusual head dims come first, then large ones. Any
        # backend suits a model without attention.
        head_dim=max(
            (heads.dim for heads in spec.layer_heads),
            key=lambda dim: (dim % HEAD_DIM_MULTIPLE != 0, dim),
            default=HEAD_DIM_MULTIPLE,
        ),
        block_tokens=block_tokens,
        has_sinks=has_sinks,
        has_soft_cap=has_soft_cap,
    )


def _facts(spec: ModelSpec | TransformersSpec) -> tuple[int, bool, bool]:
    """Return the most query heads of a layer, and whether a layer may have sinks and a soft cap."""
    if isinstance(spec, TransformersSpec):
        return spec.num_heads, True, True  # its class decides, when it runs
    layers = spec.attentions
    has_sinks = any(each.sinks for each in layers)
    has_soft_cap = any(each.soft_cap is not None for each in layers)
    return max((each.num_heads for each in layers), default=1), has_sinks, has_soft_cap


def version_of(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version such as "2.13.0+cpu"."""
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
