"""Bamba, most of whose layers have Mamba-2, and the others attention."""

from __future__ import annotations

from math import inf

from worker.errors import UnusableModel
from worker.spec.families.family import DEFAULTS, FULL, LINEAR, ConfigFields, ModelFamily
from worker.spec.families.llama import MAMBA_NAMES, MAMBA_WITHOUT_ENDING, mamba_of_config
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.tensor_names import names_of


def read_bamba(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Bamba describes. Raises UnusableModel, naming the field, if
    a value is not supported."""
    bias, mlp = config.flag("attention_bias"), config.mlp(bias=config.flag("mlp_bias"))
    found = config.get("attn_layer_indices", [])
    if not isinstance(found, list):
        raise UnusableModel(f"config.json: 'attn_layer_indices' is {found!r:.80}, not a list")
    rope = config.rope(partial=0.5)
    layer_of = {
        FULL: LayerSpec(attention=config.attention(rope, qkv_bias=bias, output_bias=bias), mlp=mlp),
        LINEAR: LayerSpec(recurrent=mamba_of_config(config), mlp=mlp),
    }
    kinds = [FULL if index in found else LINEAR for index in range(config.num_layers)]
    return config.model([layer_of[kind] for kind in kinds], config.rms_norm())


NAMES = {
    **MAMBA_NAMES,
    "norm": "model.final_layernorm",
    "mlp_norm": "model.layers.{i}.pre_ff_layernorm",
    "gate": "model.layers.{i}.feed_forward.gate_proj",
    "up": "model.layers.{i}.feed_forward.up_proj",
    "down": "model.layers.{i}.feed_forward.down_proj",
}
FAMILIES = (
    ModelFamily(
        architecture="BambaForCausalLM",
        model_type="bamba",
        defaults=DEFAULTS
        | {
            "vocab_size": 128000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "attn_layer_indices": None,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "time_step_limit": (0.0, inf),
        },
        nullable=frozenset({"num_key_value_heads", "time_step_limit"}),
        only={"hidden_act": ("silu", "swish")},  # it is also that of the convolutions
        read=read_bamba,
        names=lambda spec: names_of(NAMES, endings=dict.fromkeys(MAMBA_WITHOUT_ENDING, ("", ""))),
    ),
)
