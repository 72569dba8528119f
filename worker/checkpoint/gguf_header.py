"""Reads the model spec, and the names of tensors, from a GGUF file's header. Needs no torch.

The metadata keys are translated to those of config.json (gguf_config.py), and the reader of the
model's family reads the result. So a model's GGUF file and its Hugging Face directory give the same
spec. Tensor names and row order are those of llama.cpp's converter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from worker.checkpoint.gguf_config import LONG_FACTORS, ROPE_FREQS, SHORT_FACTORS, Metadata
from worker.checkpoint.gguf_families import gguf_family
from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.gguf_names import (
    EMBEDDING_NORM,
    FUSED_EXPERTS,
    OLD_EXPERTS,
    ROLES,
    TILED_ROLES,
    WHOLE_UP,
    WITHOUT_ENDING,
)
from worker.errors import UnusableModel
from worker.spec.draft_head import DraftHeadTensors, HeadForm, head_tensors
from worker.spec.families.registry import find_family
from worker.spec.matrices import Shape
from worker.spec.model_spec import MAX_LAYERS, LayerSpec, ModelSpec
from worker.spec.recurrent import GatedDeltaSpec
from worker.spec.rope_config import FactorScaling, LinearScaling, RopeConfig
from worker.spec.tensor_names import RowOrder, TensorNames, neighbour_orders
from worker.spec.tensors import ModelTensors

NOT_ROTATED = 9e29
"""Factors of rotary frequencies above this mark pairs that are not rotated."""


MADE_WITH_BIAS = ("attn_q", "attn_qkv", "attn_kv_a_mqa")
"""Names in a layer of tensors that make queries, keys or latents, and may have biases."""


def gguf_names(file: GGUFFile, spec: ModelSpec) -> TensorNames:
    """Return the names of the model's tensors in this file.

    Files of older llama.cpp versions, which store each expert in its own tensor, are supported.
    """
    names = architecture_names(file.metadata["general.architecture"], spec, file)
    if EMBEDDING_NORM + ".weight" in file.tensors:
        names = replace(names, roles={**names.roles, "norm": EMBEDDING_NORM})
    if any(name.endswith(".attn_kv_b.weight") for name in file.tensors):
        names = replace(names, roles={**names.roles, **WHOLE_UP})
    if any(name.endswith(".ffn_gate_up_exps.weight") for name in file.tensors):
        names = replace(names, roles={**names.roles, **FUSED_EXPERTS})
    if "blk.0.ffn_gate.0.weight" in file.tensors:
        return replace(names, roles={**names.roles, **OLD_EXPERTS})
    return names


def architecture_names(
    architecture: str, spec: ModelSpec, file: GGUFFile | None = None
) -> TensorNames:
    """Return the names of the model's tensors in files that today's llama.cpp writes, and the order
    of their rows.

    file   the file, which may also have layers for drafts; None: a file that has none
    """
    family = gguf_family(architecture)
    orders: dict[str, RowOrder] = {}
    attention = next(iter(spec.attentions), None)
    if attention is not None and family.is_interleaved:
        orders = neighbour_orders(spec)
    if attention is not None and attention.gated:
        orders = {"q": RowOrder((attention.num_heads, 2, attention.head_dim), (1, 0, 2))}
    return TensorNames(
        {**ROLES, **family.roles},
        orders=orders,
        computed=(ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS),
        endings=dict.fromkeys((*WITHOUT_ENDING, *family.without_ending), ("", "")),
        stores_decay_factors=True,
        unused=(*_drafts(file, spec), *_unread(spec)),
    )


def gguf_draft_head(
    file: GGUFFile, tensors: ModelTensors, shapes: Mapping[str, Shape]
) -> DraftHeadTensors | None:
    """Return the tensors of the model's head for drafts; None if the file has none.

    tensors   the model's
    shapes    name -> shape of each tensor in the file (tensor_shapes)

    Each layer for drafts is one block after those of the model, even if it has two blocks in other
    files. The first one is the head. As in llama.cpp, its norm may be that of the model.
    """
    spec = tensors.spec
    form = find_family({"architectures": [spec.architecture]}).draft_head(spec)
    if form is None:
        return None
    layer, norm = f"blk.{spec.num_layers}.", tensors.names.roles["norm"]
    if (own := f"{layer}nextn.shared_head_norm") + ".weight" in shapes:
        norm = own
    form = HeadForm(
        layers=form.layers,
        layer=layer,
        embedding_norm=f"{layer}nextn.enorm",
        hidden_norm=f"{layer}nextn.hnorm",
        projection=f"{layer}nextn.eh_proj",
        norm=norm,
        roles=gguf_family(file.metadata["general.architecture"]).head_roles,
    )
    return head_tensors(spec, tensors.names, form, shapes)


def _drafts(file: GGUFFile | None, spec: ModelSpec) -> list[str]:
    """Return begins of names of tensors of the layers for drafts. They follow those of the model,
    and `block_count` includes them."""
    count = 0 if file is None else Metadata(file).integer("nextn_predict_layers", 0)
    return [f"blk.{spec.num_layers + index}." for index in range(min(count, MAX_LAYERS))]


def _unread(spec: ModelSpec) -> list[str]:
    """Return begins of names of tensors of layers that read the keys and values of others."""
    return [
        f"blk.{index}.attn_{part}"
        for index, layer in enumerate(spec.layers)
        if layer.attention is not None and layer.attention.kv_of is not None
        for part in ("k.", "v.", "k_norm.")
    ]


def tensor_shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor as the model's own files have it: the converter drops or adds
    axes of some."""
    shapes = {name: info.shape for name, info in file.tensors.items()}
    is_mamba1 = file.metadata["general.architecture"] in ("mamba", "jamba")
    is_kimi = file.metadata["general.architecture"] == "kimi-linear"
    of_heads = () if is_mamba1 else (".ssm_a", ".ssm_d", ".ssm_norm.weight")
    for name, shape in shapes.items():
        if is_kimi and name.partition(".ssm_conv1d_")[1]:
            shapes[name] = (math.prod(shape[:-1]), 1, shape[-1])
        elif name.endswith((".ssm_conv1d.weight", ".shortconv.conv.weight")) and len(shape) == 2:
            shapes[name] = (shape[0], 1, shape[1])
        elif name.endswith(".ffn_gate_inp_shexp.weight") and len(shape) == 1:
            shapes[name] = (1, *shape)
        elif name.endswith(of_heads) and len(shape) == 2:
            shapes[name] = (shape[0] * shape[1],)
    return shapes


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """Return the spec of the model that the file's metadata describe. Raises UnusableModel, naming
    the key, if a key is missing, or if its value is wrong or not supported."""
    metadata = Metadata(file)
    family = gguf_family(metadata.architecture)
    if "token_embd.weight" not in file.tensors:
        raise UnusableModel(f"{file.path} holds no tensor 'token_embd.weight'")
    config = {"architectures": [family.family(metadata)], **family.common(metadata)}
    config |= family.config(metadata)
    spec = find_family(config).spec(config, source=str(file.path))
    if family.has_whole_norms:
        spec = replace(spec, norm=replace(spec.norm, offset=0.0))
    if family.add is not None:
        spec = family.add(spec, metadata)
    return _with_layers(spec, metadata)


def _with_layers(spec: ModelSpec, metadata: Metadata) -> ModelSpec:
    """Return `spec` with the biases and the factors of rotary frequencies for which the file has
    tensors."""
    tensors = metadata.file.tensors
    is_tiled = TILED_ROLES.items() <= gguf_family(metadata.architecture).roles.items()

    layers = range(spec.num_layers)
    attends = next((index for index in layers if spec.layers[index].attention is not None), 0)
    has_mlp = next((index for index in layers if spec.layers[index].mlp is not None), 0)

    def has_bias(*names: str, layer: int) -> bool:
        return any(f"blk.{layer}.{name}.bias" in tensors for name in names)

    def changed(layer: LayerSpec) -> LayerSpec:
        attention, mlp = layer.attention, layer.mlp
        if attention is not None:
            has_factors = metadata.architecture != "gemma4" or attention.window is None
            attention = replace(
                attention,
                rope=attention.rope and _with_rope_factors(attention.rope, metadata, has_factors),
                qkv_bias=attention.qkv_bias or has_bias(*MADE_WITH_BIAS, layer=attends),
                output_bias=attention.output_bias or has_bias("attn_output", layer=attends),
            )
        if mlp is not None:
            mlp = replace(mlp, bias=mlp.bias or has_bias("ffn_up", "ffn_gate", layer=has_mlp))
        recurrent = layer.recurrent
        if isinstance(recurrent, GatedDeltaSpec) and is_tiled:
            recurrent = replace(recurrent, tiled=True)
        return replace(layer, attention=attention, recurrent=recurrent, mlp=mlp)

    new = {layer: changed(layer) for layer in set(spec.layers)}
    return replace(spec, layers=tuple(new[layer] for layer in spec.layers))


def _with_rope_factors(rope: RopeConfig, metadata: Metadata, has_factors: bool) -> RopeConfig:
    """Return `rope` with the factors of ROPE_FREQS, multiplied by the linear factor if the model
    has one. The converter writes 1e30 for pairs that are not rotated.

    has_factors   whether the factors are those of the layer. In a Gemma 4, only layers without a
                  window have some
    """
    if ROPE_FREQS not in metadata.file.tensors or not has_factors:
        return rope
    factor = rope.scaling.factor if isinstance(rope.scaling, LinearScaling) else 1.0
    factors = metadata.factors(ROPE_FREQS, rope.width)
    scaled = (math.inf if each > NOT_ROTATED else factor * each for each in factors)
    return replace(rope, scaling=FactorScaling(tuple(scaled)))
