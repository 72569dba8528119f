"""Jamba, whose layers have Mamba-1 or attention without positions, and an MLP or a mixture of
experts."""

from __future__ import annotations

from worker.errors import UnusableModel
from worker.spec.families.family import DEFAULTS, ConfigFields, ModelFamily
from worker.spec.model_spec import LayerSpec, MlpSpec, ModelSpec
from worker.spec.recurrent import Mamba1Spec
from worker.spec.tensor_names import TensorNames, names_of


def read_jamba(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Jamba describes. Raises UnusableModel, naming the field, if
    a value is not supported."""
    mamba, attention = _mamba(config), config.attention(None)
    dense, mlp = config.mlp(), _experts(config)
    has_attention = _periodic(config, "attn_layer")
    has_experts = _periodic(config, "expert_layer")
    layers = [
        LayerSpec(
            attention=attention if with_attention else None,
            recurrent=None if with_attention else mamba,
            mlp=mlp if with_experts else dense,
        )
        for with_attention, with_experts in zip(has_attention, has_experts, strict=True)
    ]
    return config.model(layers, config.rms_norm())


def _periodic(config: ConfigFields, kind: str) -> list[bool]:
    """Return, for each layer, whether its index is `{kind}_offset` plus a multiple of
    `{kind}_period`."""
    period, offset = config.integer(f"{kind}_period"), config.integer(f"{kind}_offset")
    if not 0 <= offset < period:
        raise UnusableModel(
            f"{kind}_offset is {offset}; it must be at least 0, and below {kind}_period, {period}"
        )
    return [index % period == offset for index in range(config.num_layers)]


def _mamba(config: ConfigFields) -> Mamba1Spec:
    hidden = config.integer("hidden_size")
    is_auto = config.get("mamba_dt_rank") == "auto"
    return Mamba1Spec(
        channels=config.integer("mamba_expand") * hidden,
        state=config.integer("mamba_d_state"),
        rank=-(-hidden // 16) if is_auto else config.integer("mamba_dt_rank"),
        kernel=config.integer("mamba_d_conv"),
        eps=config.number("rms_norm_eps"),
        conv_bias=config.flag("mamba_conv_bias"),
        bias=config.flag("mamba_proj_bias"),
    )


def _experts(config: ConfigFields) -> MlpSpec:
    """Return the MLP of a layer with experts: a plain one, if there is only one expert."""
    experts = config.integer("num_experts")
    if experts < 2:
        return config.mlp()
    top_k = config.integer("num_experts_per_tok")
    return config.mlp(num_experts=experts, top_k=top_k, renormalize=False)


LAYER = "model.layers.{i}."
MAMBA = LAYER + "mamba."
MLP = LAYER + "feed_forward."
NAMES = {
    "norm": "model.final_layernorm",
    "mlp_norm": LAYER + "pre_ff_layernorm",
    "mamba_inputs": MAMBA + "in_proj",
    "mamba_conv": MAMBA + "conv1d",
    "mamba_made": MAMBA + "x_proj",
    "mamba_step_norm": MAMBA + "dt_layernorm",
    "mamba_b_norm": MAMBA + "b_layernorm",
    "mamba_c_norm": MAMBA + "c_layernorm",
    "mamba_step": MAMBA + "dt_proj",
    "mamba_decay": MAMBA + "A_log",
    "mamba_skip": MAMBA + "D",
    "mamba_output": MAMBA + "out_proj",
    "gate": MLP + "gate_proj",
    "up": MLP + "up_proj",
    "down": MLP + "down_proj",
    "router": MLP + "router",
    "expert_gate": MLP + "experts.{e}.gate_proj",
    "expert_up": MLP + "experts.{e}.up_proj",
    "expert_down": MLP + "experts.{e}.down_proj",
}
WITHOUT_ENDING = ("mamba_decay", "mamba_skip")


def jamba_names(spec: ModelSpec) -> TensorNames:
    return names_of(NAMES, endings=dict.fromkeys(WITHOUT_ENDING, ("", "")))


FAMILIES = (
    ModelFamily(
        architecture="JambaForCausalLM",
        model_type="jamba",
        defaults={key: value for key, value in DEFAULTS.items() if not key.startswith("rope_")}
        | {
            "vocab_size": 65536,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        only={"hidden_act": ("silu", "swish"), "mamba_inner_layernorms": (None, True)},
        aliases={"num_local_experts": "num_experts"},
        read=read_jamba,
        names=jamba_names,
    ),
)
