"""The families with latent attention: DeepSeek V2, V3 (Kimi K2 is V3) and V3.2, GLM-4.7 Flash,
Mistral 4, MiniCPM3 and Youtu."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from worker.errors import UnusableModel
from worker.spec import draft_head
from worker.spec.families.family import DEFAULTS, ConfigFields, ModelFamily
from worker.spec.families.glm import SHARED_NAMES, with_choice_bias
from worker.spec.latent import IndexerSpec, LatentSpec
from worker.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from worker.spec.rope_config import QueryGrowth, RopeConfig, query_growth, score_factor
from worker.spec.tensor_names import names_of


def read_deepseek_v2(config: ConfigFields) -> ModelSpec:
    return _with_experts(config, latent_attention(config), _softmax_experts(config))


def read_deepseek_v3(config: ConfigFields) -> ModelSpec:
    attention = latent_attention(config, turns_neighbours=config.flag("rope_interleave"))
    return _with_experts(config, attention, config.grouped_experts(shared=shared_size(config)))


def read_deepseek_v32(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of DeepSeek V3.2 describes. Raises UnusableModel, naming the
    field, if a value is not supported."""
    indexer = IndexerSpec(
        heads=config.integer("index_n_heads"),
        dim=config.integer("index_head_dim"),
        top=config.integer("index_topk"),
    )
    attention = latent_attention(config, indexer=indexer)
    experts = config.grouped_experts(shared=shared_size(config))
    are_dense = dense_layers(config, config.integer("first_k_dense_replace"))
    return _layered(config, attention, experts, lambda index: are_dense[index])


def read_glm4_moe_lite(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of GLM-4.7 Flash describes. Raises UnusableModel, naming the
    field, if a value is not supported."""
    attention = latent_attention(config, turns_neighbours=config.flag("rope_interleave"))
    experts = config.grouped_experts(shared=shared_size(config))
    are_dense = dense_layers(config, 1)
    return _layered(config, attention, experts, lambda index: are_dense[index])


def dense_layers(config: ConfigFields, first: int) -> list[bool]:
    """Return whether each layer has a plain MLP, as `mlp_layer_types` says; without it, the first
    ones. Raises UnusableModel if its values are not known."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return [index < first for index in range(config.num_layers)]
    if not isinstance(kinds, list) or len(kinds) != config.num_layers:
        raise UnusableModel(f"mlp_layer_types must be a list of {config.num_layers} layers")
    if others := sorted({*map(str, kinds)} - {"dense", "sparse"}):
        raise UnusableModel(f"MLPs of type {others[0]!r} are not supported")
    return [kind == "dense" for kind in kinds]


def read_mistral4(config: ConfigFields) -> ModelSpec:
    rotated, plain = config.integer("qk_rope_head_dim"), config.integer("qk_nope_head_dim")
    default = MISTRAL_4_ROPE | {"max_position_embeddings": config.get("max_position_embeddings")}
    rope = config.rope_of(plain + rotated, partial=rotated / (plain + rotated), default=default)
    attention = latent_attention(
        config,
        turns_neighbours=config.flag("rope_interleave"),
        rope=rope,
        default=default,
        growth=query_growth(config, default),
    )
    experts = config.grouped_experts(
        shared=shared_size(config), router="softmax", choice_bias=False
    )
    return _with_experts(config, attention, experts)


def read_minicpm3(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of MiniCPM3 describes. Raises UnusableModel, naming the field,
    if a value is not supported."""
    hidden, heads = config.integer("hidden_size"), max(config.num_heads, 1)
    value_dim = config.integer("v_head_dim", hidden // heads)
    attention = latent_attention(config, turns_neighbours=False, value_dim=value_dim)
    layer = LayerSpec(attention=attention, mlp=config.mlp(bias=config.flag("mlp_bias")))
    depth, base = config.get("scale_depth"), config.get("dim_model_base")
    return config.model(
        [layer] * config.num_layers,
        config.rms_norm(),
        embedding_scale=config.number("scale_emb"),
        residual_scale=1.0
        if depth is None
        else config.number("scale_depth") / math.sqrt(config.num_layers),
        logits_scale=1.0 if base is None else config.positive("dim_model_base") / max(hidden, 1),
    )


def read_youtu(config: ConfigFields) -> ModelSpec:
    attention = latent_attention(config, turns_neighbours=config.flag("rope_interleave"))
    layer = LayerSpec(attention=attention, mlp=config.mlp())
    return config.model([layer] * config.num_layers, config.rms_norm())


def latent_attention(
    config: ConfigFields,
    *,
    turns_neighbours: bool = True,
    value_dim: int | None = None,
    rope: RopeConfig | None = None,
    default: dict[str, Any] | None = None,
    growth: QueryGrowth | None = None,
    is_rotated: bool = True,
    indexer: IndexerSpec | None = None,
) -> AttentionSpec:
    """Return the spec of latent attention.

    rope, default   the rotary embeddings, and the rope parameters of a config that has none; None:
                    those of plain attention
    is_rotated      whether there are rotary embeddings
    """
    rotated = config.integer("qk_rope_head_dim")
    query_rank = 0 if config.get("q_lora_rank") is None else config.integer("q_lora_rank")
    latent = LatentSpec(
        rank=config.integer("kv_lora_rank"),
        rotated=rotated,
        plain=config.integer("qk_nope_head_dim"),
        value_dim=config.integer("v_head_dim") if value_dim is None else value_dim,
        query_rank=query_rank,
        turns_neighbours=turns_neighbours,
        indexer=indexer,
    )
    latent.check()
    bias = config.flag("attention_bias")
    if bias and not query_rank:
        raise UnusableModel("attention_bias is not supported without q_lora_rank")
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=1,
        head_dim=latent.head_dim,
        rope=rope or (config.rope_of(rotated) if is_rotated else None),
        scale=latent.query_dim**-0.5 * (score_factor(config, default) if is_rotated else 1.0),
        qkv_bias=bias,
        output_bias=bias,
        growth=growth,
        latent=latent,
    )


def _softmax_experts(config: ConfigFields) -> MlpSpec:
    """Return the spec of the experts of DeepSeek V2. Their groups are chosen by the largest weight
    in each, if at all."""
    method = config.text("topk_method")
    groups = {"greedy": (1, 1), "group_limited_greedy": None}
    if method not in groups:
        raise UnusableModel(
            f"topk_method {method!r} is not supported; supported: {', '.join(groups)}"
        )
    num_groups, top_groups = groups[method] or (
        config.integer("n_group"),
        config.integer("topk_group"),
    )
    return config.mlp(
        intermediate=config.integer("moe_intermediate_size"),
        num_experts=config.integer("n_routed_experts"),
        top_k=config.integer("num_experts_per_tok"),
        num_groups=num_groups,
        top_groups=top_groups,
        group_weights=1,
        renormalize=False,
        expert_scale=config.number("routed_scaling_factor"),
        shared=shared_size(config),
        scores_shared=False,
    )


def shared_size(config: ConfigFields) -> int:
    shared = config.integer("n_shared_experts")
    if shared < 1:
        raise UnusableModel(f"n_shared_experts is {shared}; it must be above zero")
    return config.integer("moe_intermediate_size") * shared


def _with_experts(config: ConfigFields, attention: AttentionSpec, experts: MlpSpec) -> ModelSpec:
    first = config.integer("first_k_dense_replace")
    return _layered(config, attention, experts, lambda index: index < first)


def _layered(
    config: ConfigFields,
    attention: AttentionSpec,
    experts: MlpSpec,
    is_dense: Callable[[int], bool],
) -> ModelSpec:
    """Return a model in which some layers have a plain MLP, the others experts."""
    dense = config.mlp()
    layers: Sequence[LayerSpec] = [
        LayerSpec(attention=attention, mlp=dense if is_dense(index) else experts)
        for index in range(config.num_layers)
    ]
    return config.model(layers, config.rms_norm())


LATENT_NAMES = {
    "query_down": "model.layers.{i}.self_attn.q_a_proj",
    "query_norm": "model.layers.{i}.self_attn.q_a_layernorm",
    "query_up": "model.layers.{i}.self_attn.q_b_proj",
    "latent_down": "model.layers.{i}.self_attn.kv_a_proj_with_mqa",
    "latent_norm": "model.layers.{i}.self_attn.kv_a_layernorm",
    "latent_up": "model.layers.{i}.self_attn.kv_b_proj",
}
INDEXER_NAMES = {
    "index_queries": "model.layers.{i}.self_attn.indexer.wq_b",
    "index_keys": "model.layers.{i}.self_attn.indexer.wk",
    "index_norm": "model.layers.{i}.self_attn.indexer.k_norm",
    "index_weights": "model.layers.{i}.self_attn.indexer.weights_proj",
}
STACKED_EXPERTS = {
    "expert_gate_up": "model.layers.{i}.mlp.experts.gate_up_proj",
    "expert_down": "model.layers.{i}.mlp.experts.down_proj",
}
MISTRAL_4_ROPE: dict[str, Any] = {
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The rope parameters of a config of Mistral 4 that has none."""
LATENT_DEFAULTS: dict[str, Any] = {
    key: value for key, value in DEFAULTS.items() if key not in ("num_key_value_heads", "head_dim")
} | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "attention_bias": False,
}
DEEPSEEK_DEFAULTS: dict[str, Any] = LATENT_DEFAULTS | {
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
}
V3_DEFAULTS: dict[str, Any] = LATENT_DEFAULTS | {
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
}
V3_EXPERTS: dict[str, Any] = {
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
    "moe_layer_freq": (None, 1),
}
"""Keys of the experts of DeepSeek V3, with the values that are supported."""
MAY_LACK_QUERY_RANK = frozenset({"q_lora_rank"})
FAMILIES = (
    ModelFamily(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        defaults=LATENT_DEFAULTS
        | {
            "vocab_size": 102400,
            "first_k_dense_replace": 0,
            "n_group": None,
            "topk_group": None,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "num_experts_per_tok": None,
            "moe_intermediate_size": 1407,
        },
        aliases={"num_experts": "n_routed_experts"},
        nullable=MAY_LACK_QUERY_RANK,
        needed={"num_experts_per_tok": 6},
        only={
            "mlp_bias": (None, False),
            "norm_topk_prob": (None, False),
            "scoring_func": (None, "softmax"),
            "moe_layer_freq": (None, 1),
        },
        read=read_deepseek_v2,
        names=lambda spec: names_of(LATENT_NAMES, SHARED_NAMES),
    ),
    ModelFamily(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        other_types=frozenset({"kimi_k2"}),
        only=V3_EXPERTS,
        defaults=V3_DEFAULTS | {"rope_interleave": True},
        aliases={"num_local_experts": "n_routed_experts"},
        nullable=MAY_LACK_QUERY_RANK,
        read=read_deepseek_v3,
        names=lambda spec: with_choice_bias(spec, LATENT_NAMES, SHARED_NAMES),
        draft_head=draft_head.after_layers,
    ),
    ModelFamily(
        architecture="DeepseekV32ForCausalLM",
        model_type="deepseek_v32",
        defaults=V3_DEFAULTS
        | {
            "max_position_embeddings": 163840,
            "mlp_layer_types": None,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 64,
        },
        aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
        only=V3_EXPERTS
        | {
            "mlp_bias": (None, False),
            "rope_interleave": (None, True),
        },
        read=read_deepseek_v32,
        names=lambda spec: with_choice_bias(spec, LATENT_NAMES, INDEXER_NAMES, SHARED_NAMES),
        draft_head=draft_head.after_layers,
    ),
    ModelFamily(
        architecture="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        defaults=DEEPSEEK_DEFAULTS
        | {
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.8,
            "q_lora_rank": 768,
            "v_head_dim": 256,
            "qk_nope_head_dim": 192,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "mlp_layer_types": None,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        nullable=MAY_LACK_QUERY_RANK,
        read=read_glm4_moe_lite,
        names=lambda spec: with_choice_bias(spec, LATENT_NAMES, SHARED_NAMES),
        draft_head=draft_head.after_layers,
    ),
    ModelFamily(
        architecture="Mistral4ForCausalLM",
        model_type="mistral4",
        defaults=DEEPSEEK_DEFAULTS
        | {
            "vocab_size": 131072,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 36,
            "n_routed_experts": 128,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 0,
            "max_position_embeddings": 1048576,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        nullable=MAY_LACK_QUERY_RANK,
        read=read_mistral4,
        names=lambda spec: names_of(
            LATENT_NAMES,
            SHARED_NAMES,
            STACKED_EXPERTS,
            endings=dict.fromkeys(STACKED_EXPERTS, ("", "")),
        ),
    ),
    ModelFamily(
        architecture="MiniCPM3ForCausalLM",
        model_type="minicpm3",
        defaults=LATENT_DEFAULTS
        | {
            "vocab_size": 73448,
            "hidden_size": 2560,
            "intermediate_size": 6400,
            "num_hidden_layers": 62,
            "num_attention_heads": 40,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "mlp_bias": False,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": None,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        nullable=MAY_LACK_QUERY_RANK | {"scale_depth", "dim_model_base"},
        read=read_minicpm3,
        names=lambda spec: names_of(LATENT_NAMES),
    ),
    ModelFamily(
        architecture="YoutuForCausalLM",
        model_type="youtu",
        defaults=LATENT_DEFAULTS
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_interleave": True,
        },
        nullable=MAY_LACK_QUERY_RANK,
        read=read_youtu,
        names=lambda spec: names_of(LATENT_NAMES),
    ),
)
