"""BERT, and the families that differ from it by their positions: RoBERTa and XLM-RoBERTa count them
from the padding token's id on, and Jina's BERT v2 has ALiBi and a gated MLP."""

from __future__ import annotations

from typing import Any

from worker.encoders.families.family import COMPUTED, EncoderConfig, EncoderFamily
from worker.encoders.spec import EncoderSpec
from worker.spec.tensor_names import TensorNames

LAYER = "encoder.layer.{i}."
ROLES = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "q": LAYER + "attention.self.query",
    "k": LAYER + "attention.self.key",
    "v": LAYER + "attention.self.value",
    "q_norm": LAYER + "attention.self.layer_norm_q",
    "k_norm": LAYER + "attention.self.layer_norm_k",
    "output": LAYER + "attention.output.dense",
    "attention_norm": LAYER + "attention.output.LayerNorm",
    "up": LAYER + "intermediate.dense",
    "down": LAYER + "output.dense",
    "mlp_norm": LAYER + "output.LayerNorm",
}
GATED = {
    "gate_up": LAYER + "mlp.gated_layers",
    "down": LAYER + "mlp.wo",
    "mlp_norm": LAYER + "mlp.layernorm",
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
}
ROBERTA_DEFAULTS = {**DEFAULTS, "vocab_size": 50265, "pad_token_id": 1}
UNUSED = ("pooler.", "cls.", "lm_head.")
"""Heads of the training, which neither vectors nor scores need."""


def read_bert(config: EncoderConfig) -> EncoderSpec:
    norm = config.layer_norm("layer_norm_eps")
    layer = config.layer(order="post")
    return config.encoder(
        [layer] * config.num_layers,
        norm,
        learned_positions=config.integer("max_position_embeddings"),
        token_types=config.integer("type_vocab_size"),
        head=config.head(activation="tanh"),
    )


def read_roberta(config: EncoderConfig) -> EncoderSpec:
    """Return the spec of RoBERTa or XLM-RoBERTa. The first position has the row after that of the
    padding token's id, and so an input can have fewer tokens than the table has rows."""
    first, rows = config.integer("pad_token_id") + 1, config.integer("max_position_embeddings")
    layer = config.layer(order="post")
    return config.encoder(
        [layer] * config.num_layers,
        config.layer_norm("layer_norm_eps"),
        context_tokens=rows - first,
        learned_positions=rows,
        first_position=first,
        token_types=config.integer("type_vocab_size"),
        head=config.head(activation="tanh"),
    )


def read_jina(config: EncoderConfig) -> EncoderSpec:
    """Return the spec of Jina's BERT v2."""
    values: dict[str, Any] = {}
    if config.text("feed_forward_type") == "geglu":
        values = {"activation": "gelu", "is_gated": True, "up_bias": False}
    layer = config.layer(order="post", **values)
    return config.encoder(
        [layer] * config.num_layers,
        config.layer_norm("layer_norm_eps"),
        token_types=config.integer("type_vocab_size"),
        has_alibi=True,
        head=config.head(activation="tanh"),
    )


def _names(spec: EncoderSpec, base: str, head: dict[str, str]) -> TensorNames:
    """Return the names of a model's tensors. They have the prefix `base` in files that were written
    with a head."""
    gated = GATED if spec.layers[0].is_gated else {}
    roles = {role: f"{base}.{name}" for role, name in {**ROLES, **gated}.items()} | head
    return TensorNames(roles, computed=COMPUTED, prefix=f"{base}.")


def bert_names(spec: EncoderSpec) -> TensorNames:
    head = {"head_dense": "bert.pooler.dense", "head_out": "classifier"}
    return _names(spec, "bert", head)


def roberta_names(spec: EncoderSpec) -> TensorNames:
    head = {"head_dense": "classifier.dense", "head_out": "classifier.out_proj"}
    return _names(spec, "roberta", head)


FAMILIES = (
    EncoderFamily(
        architectures=("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
        model_types=("bert",),
        defaults=DEFAULTS,
        read=read_bert,
        names=bert_names,
        unused=UNUSED,
        only={"position_embedding_type": ("absolute",)},
    ),
    EncoderFamily(
        architectures=(
            "XLMRobertaModel",
            "XLMRobertaForMaskedLM",
            "XLMRobertaForSequenceClassification",
        ),
        model_types=("xlm-roberta",),
        defaults=ROBERTA_DEFAULTS,
        read=read_roberta,
        names=roberta_names,
        unused=UNUSED,
        only={"position_embedding_type": ("absolute",)},
    ),
    EncoderFamily(
        architectures=("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
        model_types=("roberta",),
        defaults=ROBERTA_DEFAULTS,
        read=read_roberta,
        names=roberta_names,
        unused=UNUSED,
        only={"position_embedding_type": ("absolute",)},
    ),
    EncoderFamily(
        architectures=("JinaBertModel", "JinaBertForMaskedLM", "JinaBertForSequenceClassification"),
        model_types=("bert",),
        defaults={**DEFAULTS, "feed_forward_type": "original"},
        read=read_jina,
        names=bert_names,
        unused=UNUSED,
        only={
            "position_embedding_type": ("alibi",),
            "feed_forward_type": ("geglu", "original"),
            "attn_implementation": (None, "torch", "eager", "sdpa"),
        },
    ),
)
