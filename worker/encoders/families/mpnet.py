"""MPNet: BERT without token types, with learned biases of the scores of attention."""

from __future__ import annotations

from typing import Any

from worker.encoders.families.bert import UNUSED
from worker.encoders.families.family import COMPUTED, EncoderConfig, EncoderFamily
from worker.encoders.spec import OFFSET_BUCKETS, EncoderSpec
from worker.spec.tensor_names import TensorNames

LAYER = "encoder.layer.{i}."
ROLES = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "offset_bias": "encoder.relative_attention_bias",
    "q": LAYER + "attention.attn.q",
    "k": LAYER + "attention.attn.k",
    "v": LAYER + "attention.attn.v",
    "output": LAYER + "attention.attn.o",
    "attention_norm": LAYER + "attention.LayerNorm",
    "up": LAYER + "intermediate.dense",
    "down": LAYER + "output.dense",
    "mlp_norm": LAYER + "output.LayerNorm",
}
HEAD = {"head_dense": "classifier.dense", "head_out": "classifier.out_proj"}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 30527,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "relative_attention_num_buckets": OFFSET_BUCKETS,
}
FIRST_POSITION = 2
"""Row of the first position: the one after that of the padding token, whose id is always 1."""


def read_mpnet(config: EncoderConfig) -> EncoderSpec:
    rows = config.integer("max_position_embeddings")
    layer = config.layer(order="post")
    return config.encoder(
        [layer] * config.num_layers,
        config.layer_norm("layer_norm_eps"),
        context_tokens=rows - FIRST_POSITION,
        learned_positions=rows,
        first_position=FIRST_POSITION,
        has_offset_bias=True,
        head=config.head(activation="tanh"),
    )


def mpnet_names(spec: EncoderSpec) -> TensorNames:
    roles = {role: f"mpnet.{name}" for role, name in ROLES.items()} | HEAD
    return TensorNames(roles, computed=COMPUTED, prefix="mpnet.")


FAMILIES = (
    EncoderFamily(
        architectures=("MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification"),
        model_types=("mpnet",),
        defaults=DEFAULTS,
        read=read_mpnet,
        names=mpnet_names,
        unused=UNUSED,
        only={"relative_attention_num_buckets": (OFFSET_BUCKETS,)},
    ),
)
