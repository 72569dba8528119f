"""The families of Liquid AI: LFM2, in which short convolutions alternate with attention, and
LFM2-MoE, whose later layers have experts."""

from __future__ import annotations

from worker.errors import UnusableModel
from worker.spec.families.family import FULL, ConfigFields, ModelFamily
from worker.spec.model_spec import LayerSpec, MlpSpec, ModelSpec
from worker.spec.recurrent import ShortConvSpec
from worker.spec.tensor_names import names_of

CONV = "conv"


def _dense_width(config: ConfigFields) -> int:
    """Return the intermediate size of LFM2's MLPs: that of the config, or two thirds of it times a
    factor, rounded up to a multiple."""
    size = config.integer("block_ff_dim", config.integer("intermediate_size"))
    if not config.flag("block_auto_adjust_ff_dim"):
        return size
    multiple = config.integer("block_multiple_of")
    if multiple < 1:
        raise UnusableModel(f"block_multiple_of is {multiple}; it must be above zero")
    scaled = int(config.number("block_ffn_dim_multiplier") * int(2 * size / 3))
    return -(-scaled // multiple) * multiple


def _attention_at(config: ConfigFields) -> list[bool]:
    """Return whether each layer has attention, by `layer_types` or by the older list
    `full_attn_idxs`. A config with neither has attention in all layers."""
    chosen = config.get("full_attn_idxs", list(range(config.num_layers)))
    if not isinstance(chosen, list):
        raise UnusableModel(f"config.json: 'full_attn_idxs' is {chosen!r:.80}, not a list")
    kinds = config.layer_types(lambda index: FULL if index in chosen else CONV, known=(FULL, CONV))
    return [kind == FULL for kind in kinds]


def read_lfm2(config: ConfigFields) -> ModelSpec:
    mlp = config.mlp(intermediate=_dense_width(config), activation="silu")
    return _model(config, [mlp] * config.num_layers)


def read_lfm2_moe(config: ConfigFields) -> ModelSpec:
    if config.get("layer_types") is None:
        raise UnusableModel("config.json has no 'layer_types'")
    dense = config.mlp(activation="silu")
    experts = config.mlp(
        activation="silu",
        intermediate=config.integer("moe_intermediate_size"),
        num_experts=config.integer("num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        router="sigmoid",
        choice_bias=config.flag("use_expert_bias"),
        renormalize=config.flag("norm_topk_prob"),
        sum_eps=1e-6,
        expert_scale=config.number("routed_scaling_factor"),
    )
    num_dense = config.integer("num_dense_layers")
    return _model(
        config, [dense if index < num_dense else experts for index in range(config.num_layers)]
    )


def _model(config: ConfigFields, mlps: list[MlpSpec]) -> ModelSpec:
    """Return the model whose layers have these MLPs."""
    attention = config.attention(config.rope(), qk_norm="head")
    conv = ShortConvSpec(
        width=config.integer("hidden_size"),
        kernel=config.integer("conv_L_cache"),
        bias=config.flag("conv_bias"),
    )
    layers = [
        LayerSpec(attention=attention, mlp=mlp) if attends else LayerSpec(recurrent=conv, mlp=mlp)
        for attends, mlp in zip(_attention_at(config), mlps, strict=True)
    ]
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings"))
    return config.model(layers, config.rms_norm("norm_eps"), tied_embeddings=tied)


LFM2_NAMES = {
    "norm": "model.embedding_norm",
    "attention_norm": "model.layers.{i}.operator_norm",
    "q_norm": "model.layers.{i}.self_attn.q_layernorm",
    "k_norm": "model.layers.{i}.self_attn.k_layernorm",
    "output": "model.layers.{i}.self_attn.out_proj",
    "conv_in": "model.layers.{i}.conv.in_proj",
    "conv": "model.layers.{i}.conv.conv",
    "conv_out": "model.layers.{i}.conv.out_proj",
    "mlp_norm": "model.layers.{i}.ffn_norm",
    "gate": "model.layers.{i}.feed_forward.w1",
    "up": "model.layers.{i}.feed_forward.w3",
    "down": "model.layers.{i}.feed_forward.w2",
}
EXPERT_NAMES = {
    "router": "model.layers.{i}.feed_forward.gate",
    "choice_bias": "model.layers.{i}.feed_forward.expert_bias",
    "expert_gate": "model.layers.{i}.feed_forward.experts.{e}.w1",
    "expert_up": "model.layers.{i}.feed_forward.experts.{e}.w3",
    "expert_down": "model.layers.{i}.feed_forward.experts.{e}.w2",
}
LFM2_DEFAULTS = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "rope_parameters": None,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": None,
}
FAMILIES = (
    ModelFamily(
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        defaults=LFM2_DEFAULTS
        | {
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "full_attn_idxs": None,
        },
        typical={"full_attn_idxs": [2, 5, 8]},
        read=read_lfm2,
        names=lambda spec: names_of(LFM2_NAMES),
    ),
    ModelFamily(
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        defaults=LFM2_DEFAULTS
        | {
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        needed={"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
        read=read_lfm2_moe,
        names=lambda spec: names_of(LFM2_NAMES, EXPERT_NAMES, endings={"choice_bias": ("", "")}),
    ),
)
