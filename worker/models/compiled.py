"""Checks whether the compiled kernels support a model. Needs no torch."""

from __future__ import annotations

from worker.spec import kernel_sizes as sizes
from worker.spec.model_spec import MlpSpec, ModelSpec


def is_fitting(spec: ModelSpec) -> bool:
    """Return whether the compiled kernels support the dimensions of all layers of the model."""
    widths = {spec.hidden}
    for layer in spec.layers:
        widths |= {width for mlp in layer.mlps for width in (mlp.intermediate, mlp.shared) if width}
    if spec.layer_inputs is not None:
        widths.add(spec.layer_inputs.width)
    shapes = {(each.num_heads, each.num_kv_heads, each.head_dim) for each in spec.attentions}
    for latent in {each.latent for each in spec.attentions if each.latent is not None}:
        widths |= {latent.rank, latent.query_rank}
        if (indexer := latent.indexer) is not None:
            shapes.add((indexer.heads, 1, indexer.dim))
    return sizes.are_fitting(widths) and all(
        sizes.fits(heads=heads, kv_heads=kv_heads, head_dim=dim, sizes=tuple(widths))
        for heads, kv_heads, dim in shapes
    )


def why_not(spec: ModelSpec) -> str:
    """Return the reason why one call of the compiled kernels cannot compute a whole step; "" if it
    can."""
    if spec.head_bias:
        return "its output head has a bias"
    if spec.state_items:
        return "it has recurrent layers"
    if any(each.latent is not None for each in spec.attentions):
        return "its attention stores latents"
    if any(each.gated for each in spec.attentions):
        return "its attention has gates"
    if any(layer.has_one_block for layer in spec.layers):
        return "some of its layers have only attention or only an MLP"
    if any(mlp.shared for mlp in spec.mlps):
        return "it has shared experts"
    if any(mlp.num_experts > 1 and not _is_plain(mlp) for mlp in spec.mlps):
        return "its routers compute more than a softmax"
    if spec.altup is not None:
        return "it has several streams of hidden states"
    if any(layer.laurel is not None for layer in spec.layers):
        return "its layers have linear branches beside the attention"
    if any(mlp.gate_cutoff is not None for mlp in spec.mlps):
        return "its MLPs keep only the largest gates"
    if spec.layer_inputs is not None or any(each.scaled or each.beside for each in spec.layers):
        return "its layers have inputs, factors or experts of their own"
    if any(each.kv_of is not None or each.value_norm for each in spec.attentions):
        return "its layers share keys and values, or make them in another way"
    growths = {each.growth for each in spec.attentions}
    if len(growths) > 1 or any(each.offset for each in growths if each is not None):
        return "the queries of only some layers grow with their positions"
    if any(each.chunk is not None for each in spec.attentions):
        return "its tokens see only their own chunk of the text"
    if len({(each.num_heads, each.kv_heads) for each in spec.attentions}) > 1:
        return "its layers have different sizes"
    return ""


def _is_plain(mlp: MlpSpec) -> bool:
    """Return whether the weights of the experts are the softmax of the router's scores, and the
    experts read the hidden states."""
    return (
        mlp.router == "softmax"
        and not (mlp.choice_bias or mlp.sum_eps or mlp.latent or mlp.weighs_inputs)
        and mlp.num_groups == 1
        and mlp.expert_scale == 1.0
    )
