"""Decoders of any spec with random weights, without files."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from protocol.config.worker import WeightForm
from tests.support.kernels import randn, random_blocks
from worker.checkpoint.quant_blocks import BlockKind, QuantBlocks
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.loading.weight_layout import layout
from worker.loading.weights import load_weights
from worker.models.decoder import DecoderModel
from worker.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
from worker.spec.rope_config import RopeConfig
from worker.spec.tensor_names import TensorNames, names_of
from worker.spec.tensors import ModelTensors

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 96, 6, 2, 32, 160, 70
ROPE = RopeConfig(HEAD_DIM, 1e4)
ROLES = {
    "positions": "positions",
    "post_attention_norm": "layers.{i}.post_attention_norm",
    "mlp_norm": "layers.{i}.mlp_norm",
    "post_mlp_norm": "layers.{i}.post_mlp_norm",
    **{
        role: f"layers.{{i}}.{role}"
        for role in (
            *("delta_qkv", "delta_z", "delta_b", "delta_a", "delta_conv", "delta_decay"),
            *("delta_bias", "delta_norm", "delta_output"),
            *("mamba_inputs", "mamba_conv", "mamba_decay", "mamba_bias", "mamba_skip"),
            *("mamba_norm", "mamba_output"),
            *("lru_x", "lru_gate", "lru_conv", "lru_input_gate", "lru_decay_gate", "lru_decay"),
            *("lru_output", "conv_in", "conv", "conv_out"),
            *("shared_gate", "shared_up", "shared_down", "shared_score", "choice_bias"),
            *("query_down", "query_norm", "query_up", "latent_down", "latent_norm"),
            *("key_up", "value_up", "mamba_made", "mamba_step"),
        )
    },
}
NAMES = names_of(ROLES)


class RandomTensors:
    """A source that makes up each tensor from its name, so that a name always has the same tensor.
    All numbers are exact in bfloat16."""

    def read_into(self, name: str, target: Tensor, index: int | None = None) -> None:
        values = randn(*target.shape, dtype=torch.float32, seed=_seed_of(name, index))
        is_norm = "norm" in name and name.endswith("weight")
        target.copy_((values * 0.1 + 1 if is_norm else values * 0.15).bfloat16())

    def blocks(self, name: str, index: int | None = None) -> QuantBlocks | None:
        return None


class RandomBlocks(RandomTensors):
    """A source whose matrices are random quantised blocks, except those that are never packed."""

    def __init__(self, tensors: ModelTensors, kind: BlockKind) -> None:
        self._shapes = dict(tensors.tensors())
        self._kind = kind

    def blocks(self, name: str, index: int | None = None) -> QuantBlocks | None:
        rows, columns = self._shapes[name][-2:]
        return random_blocks(self._kind, rows, columns, seed=_seed_of(name, index))


def _seed_of(name: str, index: int | None) -> int:
    return zlib.crc32(f"{name} {index}".encode())


def attention(**changes: Any) -> AttentionSpec:
    sizes: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return AttentionSpec(**sizes | {"rope": ROPE, "scale": HEAD_DIM**-0.5} | changes)


def mlp(**changes: Any) -> MlpSpec:
    return MlpSpec(**{"intermediate": INNER} | changes)


def model_spec(*layers: LayerSpec, **changes: Any) -> ModelSpec:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden": HIDDEN, "context_tokens": 64}
    rest = {"architecture": "Random", "norm": NormSpec(eps=1e-5), "layers": layers}
    return ModelSpec(**sizes | rest | changes)


def random_decoder(
    spec: ModelSpec,
    kernels: Kernels,
    dtype: torch.dtype,
    kind: BlockKind | None = None,
    *,
    names: TensorNames = NAMES,
) -> DecoderModel:
    """Return a decoder with packed weights for compiled kernels, else with dense ones. With `kind`,
    the weights are quantised blocks, and their inputs are rounded to eight bits."""
    form: WeightForm = "packed" if isinstance(kernels, NativeKernels) else "dense"
    tensors = ModelTensors(spec, names)
    weights = load_weights(
        tensors,
        RandomTensors() if kind is None else RandomBlocks(tensors, kind),
        dtype=dtype,
        device=torch.device("cpu"),
        layout=layout(kernels, form, dtype, "bfloat16" if kind is None else "int8"),
    )
    return DecoderModel(spec, weights, kernels)
