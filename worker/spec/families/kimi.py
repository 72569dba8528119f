"""The family of Kimi Linear: Kimi's delta attention, which is a gated delta net with a decay for
each row of its states, and some layers of latent attention without positions."""

from __future__ import annotations

from typing import Any

from worker.errors import UnusableModel
from worker.spec.families.deepseek import (
    LATENT_DEFAULTS,
    LATENT_NAMES,
    MAY_LACK_QUERY_RANK,
    dense_layers,
    latent_attention,
    shared_size,
)
from worker.spec.families.family import FULL, LINEAR, ConfigFields, ModelFamily
from worker.spec.fields import Fields
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.recurrent import GatedDeltaSpec
from worker.spec.tensor_names import names_of

PERIOD = 4
"""If a config does not say which layers have attention, every fourth one has it, but not the
first."""


def read_kimi_linear(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Kimi Linear describes. Published configs have the sizes of
    the delta attention in an object of their own. Raises UnusableModel, naming the field, if a
    value is not supported."""
    own = config.get("linear_attn_config")
    if own is not None and not isinstance(own, dict):
        raise UnusableModel("linear_attn_config must be an object")
    linear = Fields(own or {}, "linear_attn_config")
    heads = linear.integer("num_heads", config.integer("linear_num_heads"))
    dim = linear.integer("head_dim", config.integer("linear_head_dim"))
    delta = GatedDeltaSpec(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        kernel=linear.integer("short_conv_kernel_size", config.integer("linear_conv_kernel_dim")),
        eps=config.number("rms_norm_eps"),
        decay_rank=dim,
        gate_rank=dim,
        gate="sigmoid",
    )
    attention = latent_attention(config, turns_neighbours=False, is_rotated=False)
    experts = config.grouped_experts(shared=shared_size(config))
    dense, kinds = config.mlp(), _mixers(config, linear)
    are_dense = dense_layers(config, config.integer("first_k_dense_replace", 1))
    layers = [
        LayerSpec(
            attention=attention if kind == FULL else None,
            recurrent=delta if kind == LINEAR else None,
            mlp=dense if is_dense else experts,
        )
        for kind, is_dense in zip(kinds, are_dense, strict=True)
    ]
    return config.model(layers, config.rms_norm())


def _mixers(config: ConfigFields, linear: Fields) -> list[str]:
    """Return the kind of each layer. `full_attn_layers` of published configs counts them from 1."""
    full = linear.get("full_attn_layers")
    if config.get("layer_types") is None and isinstance(full, list):
        return [FULL if index + 1 in full else LINEAR for index in range(config.num_layers)]
    return config.layer_types(
        lambda index: FULL if index and index % PERIOD == 0 else LINEAR, known=(FULL, LINEAR)
    )


MIXER, MOE = "model.layers.{i}.self_attn.", "model.layers.{i}.block_sparse_moe."
NAMES = {
    **LATENT_NAMES,
    "delta_q": MIXER + "q_proj",
    "delta_k": MIXER + "k_proj",
    "delta_v": MIXER + "v_proj",
    "delta_a": MIXER + "f_a_proj",
    "delta_a_up": MIXER + "f_b_proj",
    "delta_z": MIXER + "g_a_proj",
    "delta_z_up": MIXER + "g_b_proj",
    "delta_b": MIXER + "b_proj",
    "delta_conv": MIXER + "{p}_conv1d",
    "delta_decay": MIXER + "A_log",
    "delta_bias": MIXER + "dt_bias",
    "delta_norm": MIXER + "o_norm",
    "delta_output": MIXER + "o_proj",
    "router": MOE + "gate",
    "choice_bias": MOE + "gate.e_score_correction_bias",
    "expert_gate": MOE + "experts.{e}.w1",
    "expert_up": MOE + "experts.{e}.w3",
    "expert_down": MOE + "experts.{e}.w2",
    "shared_gate": MOE + "shared_experts.gate_proj",
    "shared_up": MOE + "shared_experts.up_proj",
    "shared_down": MOE + "shared_experts.down_proj",
}
DENSE = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
"""Role of a plain MLP -> the end of its name. transformers writes these beside experts."""
DEFAULTS: dict[str, Any] = {
    key: value for key, value in LATENT_DEFAULTS.items() if not key.startswith("rope_")
} | {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "mlp_layer_types": None,
    "layer_types": None,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
FAMILIES = (
    ModelFamily(
        architecture="KimiLinearForCausalLM",
        model_type="kimi_linear",
        defaults=DEFAULTS,
        aliases={
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_experts": "n_routed_experts",
            "num_local_experts": "n_routed_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
        },
        nullable=MAY_LACK_QUERY_RANK,
        only={
            "mla_use_nope": (None, True),
            "moe_router_activation_func": (None, "sigmoid"),
            "moe_layer_freq": (None, 1),
        },
        read=read_kimi_linear,
        names=lambda spec: names_of(
            NAMES,
            endings=dict.fromkeys(("delta_decay", "delta_bias", "choice_bias"), ("", "")),
            others={role: (f"{MOE}{end}",) for role, end in DENSE.items()},
        ),
    ),
)
