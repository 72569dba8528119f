"""Checks whether the compiled kernels support a model. Needs no torch."""

from __future__ import annotations

from worker.spec import kernel_sizes as sizes
from worker.spec.model_spec import ModelSpec


def is_fitting(spec: ModelSpec) -> bool:
    """Return whether the compiled kernels support the dimensions of all layers of the model."""
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
    """Return the reason why one call of the compiled kernels cannot compute a whole step; "" if it
    can."""
    if spec.head_bias:
        return "its output head has a bias"
    if len({each.num_heads for each in spec.attentions}) > 1:
        return "its layers have different sizes"
    return ""
