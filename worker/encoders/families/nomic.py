"""Nomic's BERT: rotary embeddings instead of a table of positions, gated MLPs, and no biases.

The published configs use GPT-2's keys, and keys of their own for what GPT-2 does not have.
transformers writes its usual keys, but the published names of tensors.
"""

from __future__ import annotations

from typing import Any

from worker.encoders.families.bert import UNUSED
from worker.encoders.families.family import COMPUTED, EncoderConfig, EncoderFamily
from worker.encoders.spec import EncoderSpec
from worker.errors import UnusableModel
from worker.spec.fields import Fields
from worker.spec.rope_config import RopeConfig
from worker.spec.tensor_names import TensorNames

LAYER = "encoder.layers.{i}."
ROLES = {
    "embedding": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "emb_ln",
    "qkv": LAYER + "attn.Wqkv",
    "output": LAYER + "attn.out_proj",
    "attention_norm": LAYER + "norm1",
    "gate": LAYER + "mlp.fc12",
    "up": LAYER + "mlp.fc11",
    "down": LAYER + "mlp.fc2",
    "mlp_norm": LAYER + "norm2",
}
TRAINED_TOKENS = 2048
"""Tokens of the longest texts in training, if a config does not give them."""
DEFAULTS: dict[str, Any] = {
    "vocab_size": 30528,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "silu",
    "max_position_embeddings": TRAINED_TOKENS,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "rotary_emb_base": 1000,
    "rope_parameters": None,
}
ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
OFF = (None, False)
ONLY: dict[str, tuple[Any, ...]] = {
    "moe_every_n_layers": (None, 0),  # nomic-embed-text-v2-moe
    "activation_function": (None, "swiglu"),
    "rotary_emb_fraction": (None, 1.0),
    "rotary_emb_interleaved": OFF,
    "rotary_emb_scale_base": (None,),
    "rotary_head_dim": OFF,
    "causal": OFF,
    "prenorm": OFF,
    "parallel_block": OFF,
    "use_rms_norm": OFF,
    "qkv_proj_bias": OFF,
    "mlp_fc1_bias": OFF,
    "mlp_fc2_bias": OFF,
}
PREFIXES = {"NomicBertForPreTraining": "bert."}
"""Class -> prefix of the tensors of its encoder, for classes that transformers does not have."""
PREFIX = "nomic_bert."


def read_nomic(config: EncoderConfig) -> EncoderSpec:
    rope, is_scaled = _rope(config)
    layer = config.layer(
        order="post",
        rope=rope,
        is_gated=True,
        qkv_bias=False,
        output_bias=False,
        up_bias=False,
        down_bias=False,
    )
    context = config.integer("max_position_embeddings")
    if is_scaled:
        context = min(context, config.integer("max_trained_positions", TRAINED_TOKENS))
    return config.encoder(
        [layer] * config.num_layers,
        config.layer_norm("layer_norm_eps"),
        context_tokens=context,
        token_types=config.integer("type_vocab_size"),
        head=config.head(activation="tanh"),
    )


def _rope(config: EncoderConfig) -> tuple[RopeConfig, bool]:
    """Return the rotary embeddings, and whether the model scales them for inputs that are longer
    than its training texts. Such inputs are not supported, because the scale depends on each
    input's length."""
    rope = Fields(config.get("rope_parameters", {}), "rope_parameters")
    kind = rope.text("rope_type", "default")
    fraction = rope.get("partial_rotary_factor", 1.0)
    if kind not in ("default", "dynamic") or fraction != 1.0:
        raise UnusableModel(
            f"rope_type {kind!r} with partial_rotary_factor {fraction!r:.80} is not supported for "
            "Nomic's BERT"
        )
    head_dim = config.integer("hidden_size") // max(config.num_heads, 1)
    if config.integer("head_dim", head_dim) != head_dim:
        raise UnusableModel(f"head_dim {config.get('head_dim')} is not supported; only {head_dim}")
    theta = rope.number("rope_theta", config.number("rotary_emb_base"))
    is_scaled = kind == "dynamic" or config.get("rotary_scaling_factor") is not None
    return RopeConfig(head_dim, theta), is_scaled


def nomic_names(spec: EncoderSpec) -> TensorNames:
    prefix = PREFIXES.get(spec.architecture, PREFIX)
    roles = {role: prefix + name for role, name in ROLES.items()}
    roles |= {"head_dense": f"{prefix}pooler.dense", "head_out": "classifier"}
    return TensorNames(roles, computed=COMPUTED, prefix=prefix)


FAMILIES = (
    EncoderFamily(
        architectures=(
            "NomicBertModel",
            "NomicBertForMaskedLM",
            "NomicBertForPreTraining",
            "NomicBertForSequenceClassification",
        ),
        model_types=("nomic_bert",),
        defaults=DEFAULTS,
        aliases=ALIASES,
        read=read_nomic,
        names=nomic_names,
        unused=UNUSED,
        only=ONLY,
    ),
)
