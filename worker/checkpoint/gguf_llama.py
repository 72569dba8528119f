"""Translates the metadata of GGUF files of Llama 4 and Apertus to the keys of config.json. Needs no
torch."""

from __future__ import annotations

from dataclasses import replace

from worker.checkpoint.gguf_config import Config, Metadata, rms
from worker.errors import UnusableModel
from worker.spec.fields import Fields
from worker.spec.model_spec import ModelSpec, Xielu

XIELU_KEYS = ("xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps")
"""Keys of the numbers of an xIELU, in the order of `Xielu.of`. They lack the architecture."""
WITHOUT_NORMS = 128
"""Number of experts of the only Llama 4 whose queries and keys have no norms."""


def llama4(metadata: Metadata) -> Config:
    """Return the keys of Llama 4 besides those of `common`. As in llama.cpp, the layers without
    positions, the chunks, and the growth of queries are those of the published models, and the
    number of experts says whether queries and keys have norms."""
    name = "attention.sliding_window"
    if metadata.integer(name, 1) == 0:
        raise UnusableModel(f"{metadata.key(name)} 0 is not supported: a model without chunks")
    experts = metadata.integer("expert_count")
    return {
        **rms(metadata),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.shared("feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "interleave_moe_layer_step": metadata.integer("interleave_moe_layer_step"),
        "use_qk_norm": experts != WITHOUT_NORMS,
    }


def with_xielu(spec: ModelSpec, metadata: Metadata) -> ModelSpec:
    """Return `spec` with the numbers of the xIELU of each layer, which files store as metadata."""
    columns = [_by_layer(metadata, key) for key in XIELU_KEYS]
    layers = [
        replace(layer, mlp=layer.mlp and replace(layer.mlp, xielu=Xielu.of(*numbers)))
        for layer, *numbers in zip(spec.layers, *columns, strict=True)
    ]
    return replace(spec, layers=tuple(layers))


def _by_layer(metadata: Metadata, key: str) -> list[float]:
    """Return the number of each layer: the items of a list, or one number for all."""
    found, count = metadata.fields.get(key), metadata.num_layers
    if not isinstance(found, list):
        return [metadata.fields.number(key)] * count
    if len(found) != count:
        raise UnusableModel(f"{key} must have a number for each of {count} layers")
    return [Fields({key: each}, str(metadata.file.path)).number(key) for each in found]
