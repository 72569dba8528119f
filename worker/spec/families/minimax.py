"""The family of MiniMax M2: experts in each layer, and norms over all heads of queries and keys."""

from __future__ import annotations

from worker.spec.families.family import DEFAULTS, ConfigFields, ModelFamily
from worker.spec.families.glm import with_choice_bias
from worker.spec.families.mistral import MIXTRAL_NAMES
from worker.spec.model_spec import LayerSpec, ModelSpec


def read_minimax_m2(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of MiniMax M2 describes. Published configs have the rotated
    width of a head as `rotary_dim`."""
    head_dim = config.head_dim
    share = config.integer("rotary_dim", head_dim) / max(head_dim, 1)
    attention = config.attention(config.rope(partial=share), qk_norm="projection")
    experts = config.mlp(
        num_experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        router="sigmoid",
        choice_bias=True,
    )
    layer = LayerSpec(attention=attention, mlp=experts)
    return config.model([layer] * config.num_layers, config.rms_norm())


FAMILIES = (
    ModelFamily(
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        defaults=DEFAULTS
        | {
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5000000.0,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
        },
        aliases={"num_experts": "num_local_experts"},
        read=read_minimax_m2,
        names=lambda spec: with_choice_bias(
            spec, MIXTRAL_NAMES, name="block_sparse_moe.e_score_correction_bias"
        ),
    ),
)
