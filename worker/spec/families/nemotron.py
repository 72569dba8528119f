"""Nemotron 3 and 4, with attention only, and Nemotron-H, whose layers have one block each: Mamba-2,
attention without positions, an MLP, or a mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from worker.errors import UnusableModel
from worker.spec import draft_head
from worker.spec.families.family import (
    DEFAULTS,
    FULL,
    LINEAR,
    OLDER_KINDS,
    ConfigFields,
    ModelFamily,
)
from worker.spec.model_spec import LayerSpec, MlpSpec, ModelSpec, checked_layers
from worker.spec.recurrent import Mamba2Spec
from worker.spec.tensor_names import TensorNames, names_of

MLP, EXPERTS = "mlp", "moe"
KINDS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
"""Letter in `hybrid_override_pattern` -> kind of layer."""


def read_nemotron(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Nemotron 3 or 4 describes. Layer norms multiply by
    1 + weight."""
    bias = config.flag("attention_bias")
    attention = config.attention(config.rope(partial=0.5), qkv_bias=bias, output_bias=bias)
    mlp = config.mlp(bias=config.flag("mlp_bias"), is_gated=False)
    norm = replace(config.layer_norm("norm_eps"), offset=1.0)
    return config.model([LayerSpec(attention=attention, mlp=mlp)] * config.num_layers, norm)


def read_nemotron_h(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Nemotron-H describes. Raises UnusableModel, naming the
    field, if a value is not supported.

    dt is limited by `time_step_limit`, as in NVIDIA's own class. The class of transformers limits
    it to `time_step_min`, which is meant for the first values of the weights, and only in prompts.
    """
    if config.get("attention_head_dim", config.head_dim) != config.head_dim:
        raise UnusableModel(
            f"attention_head_dim {config.get('attention_head_dim')!r:.80} is not head_dim, "
            f"{config.head_dim}"
        )
    kinds = _kinds(config)
    layers: dict[str, LayerSpec] = {}
    for kind in kinds:
        match kind:
            case _ if kind in layers:
                continue
            case "linear_attention":
                layers[kind] = LayerSpec(recurrent=_mamba(config))
            case "full_attention":
                layers[kind] = LayerSpec(attention=config.attention(None))
            case "mlp":
                layers[kind] = LayerSpec(mlp=_mlp(config))
            case _:
                layers[kind] = LayerSpec(mlp=_experts(config))
    norm = config.rms_norm("layer_norm_epsilon")
    return config.model([layers[kind] for kind in kinds], norm)


def _kinds(config: ConfigFields) -> list[str]:
    """Return the kind of each layer, by the list of kinds or by the older pattern. The number of
    layers is that of their items."""
    kinds = config.get("layer_types")
    if kinds is None and (pattern := config.get("hybrid_override_pattern")) is not None:
        kinds = [KINDS.get(letter, letter) for letter in str(pattern)]
    if kinds is None:
        kinds = [LINEAR, EXPERTS, FULL, MLP]
    if not isinstance(kinds, list):
        raise UnusableModel(f"layers_block_type must be a list of kinds of layers: {kinds!r:.80}")
    checked_layers(len(kinds))
    kinds = [OLDER_KINDS.get(str(kind), str(kind)) for kind in kinds]
    if others := sorted(set(kinds) - {*KINDS.values()}):
        raise UnusableModel(
            f"layers of type {others[0]!r:.80} are not supported for {config.architecture}"
        )
    return kinds


def _mamba(config: ConfigFields) -> Mamba2Spec:
    return Mamba2Spec(
        num_heads=config.integer("mamba_num_heads"),
        head_dim=config.integer("mamba_head_dim"),
        num_groups=config.integer("n_groups"),
        state=config.integer("ssm_state_size"),
        kernel=config.integer("conv_kernel"),
        eps=config.number("layer_norm_epsilon"),
        conv_bias=config.flag("use_conv_bias"),
        bias=config.flag("use_bias"),
        limits=config.limits("time_step_limit"),
    )


def _mlp(config: ConfigFields) -> MlpSpec:
    activation = config.activation("mlp_hidden_act")
    return config.mlp(activation=activation, is_gated=False, bias=config.flag("mlp_bias"))


def _experts(config: ConfigFields) -> MlpSpec:
    experts = config.integer("n_routed_experts")
    if experts < 2:
        raise UnusableModel(f"n_routed_experts is {experts}; it must be above one")
    if config.flag("mlp_bias"):
        raise UnusableModel("mlp_bias true is not supported for layers with experts")
    return config.grouped_experts(
        activation=config.activation("mlp_hidden_act"),
        is_gated=False,
        latent=config.integer("moe_latent_size", 0),
        shared=config.integer("moe_shared_expert_intermediate_size"),
    )


PREFIX = "backbone."
LAYER = PREFIX + "layers.{i}."
MIXER = LAYER + "mixer."
NAMES = {
    "embedding": PREFIX + "embeddings",
    "norm": PREFIX + "norm_f",
    "attention_norm": LAYER + "norm",
    "mlp_norm": LAYER + "norm",
    "q": MIXER + "q_proj",
    "k": MIXER + "k_proj",
    "v": MIXER + "v_proj",
    "output": MIXER + "o_proj",
    "mamba_inputs": MIXER + "in_proj",
    "mamba_conv": MIXER + "conv1d",
    "mamba_decay": MIXER + "A_log",
    "mamba_bias": MIXER + "dt_bias",
    "mamba_skip": MIXER + "D",
    "mamba_norm": MIXER + "norm",
    "mamba_output": MIXER + "out_proj",
    "up": MIXER + "up_proj",
    "down": MIXER + "down_proj",
    "router": MIXER + "gate",
    "choice_bias": MIXER + "gate.e_score_correction_bias",
    "expert_up": MIXER + "experts.{e}.up_proj",
    "expert_down": MIXER + "experts.{e}.down_proj",
    "shared_up": MIXER + "shared_experts.up_proj",
    "shared_down": MIXER + "shared_experts.down_proj",
    "latent_in": MIXER + "fc1_latent_proj",
    "latent_out": MIXER + "fc2_latent_proj",
}
WITHOUT_ENDING = ("mamba_decay", "mamba_bias", "mamba_skip", "choice_bias")


def nemotron_h_names(spec: ModelSpec) -> TensorNames:
    """Return the tensor names. Those of the head for drafts begin with `mtp.`."""
    endings = dict.fromkeys(WITHOUT_ENDING, ("", ""))
    return names_of(NAMES, endings=endings, unused=("mtp.",), prefix=PREFIX, other_prefix="model.")


NEMOTRON_DEFAULTS: dict[str, Any] = {
    key: value for key, value in DEFAULTS.items() if key != "rms_norm_eps"
}
FAMILIES = (
    ModelFamily(
        architecture="NemotronForCausalLM",
        model_type="nemotron",
        defaults=NEMOTRON_DEFAULTS
        | {
            "vocab_size": 256000,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 48,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
        },
        read=read_nemotron,
        names=lambda spec: names_of(),
    ),
    ModelFamily(
        architecture="NemotronHForCausalLM",
        model_type="nemotron_h",
        defaults={
            "vocab_size": 131072,
            "hidden_size": 4096,
            "layer_types": None,
            "hybrid_override_pattern": None,
            "tie_word_embeddings": False,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "intermediate_size": 21504,
            "mlp_hidden_act": "relu2",
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "mamba_hidden_act": "silu",
            "n_groups": 8,
            "conv_kernel": 4,
            "time_step_limit": (0.0, inf),
            "use_conv_bias": True,
            "use_bias": False,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        only={"attention_bias": (False,), "mamba_hidden_act": ("silu", "swish")},
        aliases={
            "layers_block_type": "layer_types",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_dt_limit": "time_step_limit",
            "mamba_conv_bias": "use_conv_bias",
        },
        read=read_nemotron_h,
        names=nemotron_h_names,
        draft_head=draft_head.of_nemotron_h,
    ),
)
