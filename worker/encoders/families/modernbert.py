"""ModernBERT: rotary embeddings, gated MLPs, and windows in most layers."""

from __future__ import annotations

from typing import Any

from worker.encoders.families.family import COMPUTED, EncoderConfig, EncoderFamily
from worker.encoders.spec import EncoderSpec
from worker.errors import UnusableModel
from worker.spec.families.family import FULL, SLIDING
from worker.spec.rope_config import RopeConfig, layered_rope_config
from worker.spec.tensor_names import TensorNames

LAYER = "layers.{i}."
ROLES = {
    "embedding": "embeddings.tok_embeddings",
    "embedding_norm": "embeddings.norm",
    "attention_norm": LAYER + "attn_norm",
    "qkv": LAYER + "attn.Wqkv",
    "output": LAYER + "attn.Wo",
    "mlp_norm": LAYER + "mlp_norm",
    "gate_up": LAYER + "mlp.Wi",
    "down": LAYER + "mlp.Wo",
    "norm": "final_norm",
}
HEAD = {"head_dense": "head.dense", "head_norm": "head.norm", "head_out": "classifier"}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "layer_types": None,
    "rope_parameters": None,
    "local_attention": 128,
    "mlp_bias": False,
    "classifier_pooling": "cls",
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "global_attn_every_n_layers": 3,
    "rope_theta": 160_000.0,
}
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
"""Kind of a layer -> key of its rotary base in older configs, and the default base."""


def read_modernbert(config: EncoderConfig) -> EncoderSpec:
    interval = config.integer("global_attn_every_n_layers")
    if interval < 1:
        raise UnusableModel(f"global_attn_every_n_layers is {interval}; it must be above zero")
    kinds = config.layer_types(lambda index: SLIDING if index % interval else FULL)
    ropes = {kind: _rope(config, kind) for kind in set(kinds)}
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    window = config.integer("local_attention") // 2
    if window < 1:
        raise UnusableModel(f"local_attention is {2 * window}; it must be at least 2")
    layers = [
        config.layer(
            order="pre",
            activation=config.activation("hidden_activation"),
            rope=ropes[kind],
            window=window if kind == SLIDING else None,
            qkv_bias=bias,
            output_bias=bias,
            has_attention_norm=index > 0,
            is_gated=True,
            up_bias=mlp_bias,
            down_bias=mlp_bias,
        )
        for index, kind in enumerate(kinds)
    ]
    head = config.head(
        pooling=config.text("classifier_pooling"),
        activation=config.activation("classifier_activation"),
        dense_bias=config.flag("classifier_bias"),
        has_norm=True,
    )
    norm = config.layer_norm("norm_eps", bias=config.flag("norm_bias"))
    return config.encoder(layers, norm, has_final_norm=True, head=head)


def _rope(config: EncoderConfig, kind: str) -> RopeConfig:
    key, default = THETAS[kind]
    head_dim = config.integer("hidden_size") // max(config.num_heads, 1)
    return layered_rope_config(config, head_dim, kind, theta=key, default_theta=default)


def modernbert_names(spec: EncoderSpec) -> TensorNames:
    roles = {role: f"model.{name}" for role, name in ROLES.items()} | HEAD
    return TensorNames(roles, computed=COMPUTED, prefix="model.")


FAMILIES = (
    EncoderFamily(
        architectures=(
            "ModernBertModel",
            "ModernBertForMaskedLM",
            "ModernBertForSequenceClassification",
        ),
        model_types=("modernbert",),
        defaults=DEFAULTS,
        read=read_modernbert,
        names=modernbert_names,
        unused=("head.", "decoder."),
        only={"classifier_pooling": ("cls", "mean")},
    ),
)
