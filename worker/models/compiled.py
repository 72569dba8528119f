"""What the compiled kernels support of a model. Needs no torch."""

from __future__ import annotations

from worker.kernels import sizes
from worker.models.spec import LayerSpec, ModelSpec


def is_fitting(spec: ModelSpec) -> bool:
    """Return whether the compiled kernels support the model."""
    return all(
        sizes.fits(
            heads=layer.attention.num_heads,
            kv_heads=layer.attention.num_kv_heads,
            head_dim=layer.attention.head_dim,
            sizes=(spec.hidden, layer.mlp.intermediate),
        )
        for layer in set(spec.layers)
    )


def why_not(spec: ModelSpec) -> str:
    """Return why one call of the compiled kernels cannot compute a step; empty if it can."""
    if spec.norm.kind != "rms" or spec.norm.offset:
        return "its norms are not plain RMS norms"
    if spec.learned_positions or spec.head_bias:
        return "it has learned positions, or a bias in the output head"
    if len({each.rope for each in spec.attentions} - {None}) > 1:
        return "its layers have different rotary embeddings"
    if len({(each.attention.num_heads, each.mlp.intermediate) for each in spec.layers}) > 1:
        return "its layers have different sizes"
    reasons = map(_why_not_layer, spec.layers)
    return next(filter(None, reasons), "")


def _why_not_layer(layer: LayerSpec) -> str:
    attention, mlp = layer.attention, layer.mlp
    if layer.order != "pre":
        return "its norms do not stand before each block only"
    if mlp.num_experts > 1:
        return "it is a mixture of experts"
    if not mlp.is_gated or mlp.activation != "silu":
        return "its MLP is not a gated silu"
    if attention.rope is not None and attention.rope.width != attention.head_dim:
        return "its rotary embeddings turn only a part of each head"
    return ""
