"""The family of Phi-3 and Phi-4-mini. Its files hold fused matrices, and its rotary embeddings may
rotate only part of each head."""

from __future__ import annotations

from worker.errors import UnusableModel
from worker.spec.families.family import DEFAULTS, ConfigFields, ModelFamily
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.tensor_names import names_of


def read_phi3(config: ConfigFields) -> ModelSpec:
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        if not isinstance(rope, dict):
            raise UnusableModel(f"config.json: {key!r} is {rope!r:.80}, not an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "longrope", "su"):
            raise UnusableModel(f"rope_type {kind!r} is not supported for phi3")
    attention = config.attention(config.rope(partial=1.0), window=config.window)
    layer = LayerSpec(attention=attention, mlp=config.mlp())
    return config.model([layer] * config.num_layers, config.rms_norm())


NAMES = {
    "qkv": "model.layers.{i}.self_attn.qkv_proj",
    "gate_up": "model.layers.{i}.mlp.gate_up_proj",
}
FAMILIES = (
    ModelFamily(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        defaults=DEFAULTS
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        read=read_phi3,
        names=lambda spec: names_of(NAMES),
    ),
)
