"""The text model of Gemma 3n.

The hidden states of a token are several streams (`AltUpSpec`). Each layer has inputs of its own
(`LayerInputsSpec`) and a linear branch beside its attention (`LayerSpec.laurel`). The last layers
read the keys and values of earlier ones. The MLPs of the first layers keep only their largest
gates.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

from worker.errors import UnusableModel
from worker.spec.altup_spec import AltUpSpec
from worker.spec.families.family import DEFAULTS, FULL, SLIDING, ConfigFields, ModelFamily, every
from worker.spec.families.gemma4 import (
    DENSE_NAMES,
    LAYER,
    kv_source,
    layer_inputs_of,
    unused_names,
)
from worker.spec.fields import Fields
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.rope_config import layered_rope_config
from worker.spec.tensor_names import TensorNames, names_of

SPARSE_LAYERS, SPARSITY = 10, 0.95
"""Number of the first layers that keep only their largest gates if the config does not say it, in
models with more layers, and the share of the gates that they drop."""


def read_gemma3n(config: ConfigFields) -> ModelSpec:
    kinds = config.layer_types(every(5))
    first_shared = config.num_layers - config.integer("num_kv_shared_layers")
    activation, bias = config.activation("hidden_activation"), config.flag("attention_bias")
    widths, cutoffs = _widths(config), _cutoffs(config)
    ropes = {
        SLIDING: layered_rope_config(
            config, config.head_dim, SLIDING, theta="rope_local_base_freq", default_theta=1e4
        ),
        FULL: layered_rope_config(
            config, config.head_dim, FULL, theta="rope_theta", default_theta=1e6
        ),
    }
    layers = []
    for index, kind in enumerate(kinds):
        is_shared = index >= first_shared
        attention = config.attention(
            ropes[kind],
            scale=1.0,
            window=config.window if kind == SLIDING else None,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="head",
            value_norm=not is_shared,
            kv_of=kv_source(kinds, first_shared, kind) if is_shared else None,
        )
        mlp = config.mlp(
            activation=activation, intermediate=widths[index], gate_cutoff=cutoffs[index]
        )
        rank = config.integer("laurel_rank")
        layers.append(LayerSpec(attention=attention, mlp=mlp, laurel=rank, order="both"))
    cap = config.get("final_logit_softcapping")
    inputs = layer_inputs_of(config)
    return config.model(
        layers,
        config.rms_norm(),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logits_soft_cap=None if cap is None else config.positive("final_logit_softcapping"),
        layer_inputs=None if inputs is None else replace(inputs, others_read_first=True),
        altup=AltUpSpec(
            streams=config.integer("altup_num_inputs"),
            active=config.integer("altup_active_idx"),
            scaled=config.flag("altup_correct_scale"),
        ),
    )


def _widths(config: ConfigFields) -> list[int]:
    """Return the intermediate size of each layer: the config has one number or a list."""
    key = "intermediate_size"
    if not isinstance(config.get(key), list):
        return [config.integer(key)] * config.num_layers
    each = _of_layers(config, key)
    return [each.integer(str(index)) for index in range(config.num_layers)]


def _cutoffs(config: ConfigFields) -> list[float | None]:
    """Return, for each layer, how many standard deviations above their mean the gates are cut off;
    None: they are not. The config has the share of the gates that is dropped if they are normally
    distributed."""
    key, count = "activation_sparsity_pattern", config.num_layers
    if config.get(key) is None:
        num_sparse = SPARSE_LAYERS if count > SPARSE_LAYERS else 0
        shares = [SPARSITY] * num_sparse + [0.0] * (count - num_sparse)
    else:
        each = _of_layers(config, key)
        shares = [each.number(str(index)) for index in range(count)]
    if others := [share for share in shares if not 0 <= share < 1]:
        raise UnusableModel(f"{key} has {others[0]}; shares of gates are within 0..1")
    return [NormalDist().inv_cdf(share) if share else None for share in shares]


def _of_layers(config: ConfigFields, key: str) -> Fields:
    """Return the values of a list with one for each layer, by the layer's number."""
    values = config.get(key)
    if not isinstance(values, list) or len(values) != config.num_layers:
        raise UnusableModel(f"{key} must be a list of {config.num_layers} layers")
    return Fields({str(index): value for index, value in enumerate(values)}, key)


NAMES = DENSE_NAMES | {
    "laurel_in": LAYER + "laurel.linear_left",
    "laurel_out": LAYER + "laurel.linear_right",
    "laurel_norm": LAYER + "laurel.post_laurel_norm",
    "altup_router": LAYER + "altup.modality_router",
    "altup_router_norm": LAYER + "altup.router_norm",
    "altup_predictions": LAYER + "altup.prediction_coefs",
    "altup_corrections": LAYER + "altup.correction_coefs",
    "altup_scale": LAYER + "altup.correct_output_scale",
    "stream_spread": "model.altup_projections.{i}",
    "stream_merge": "model.altup_unembed_projections.{i}",
}


def gemma3n_names(spec: ModelSpec) -> TensorNames:
    """Return the tensor names of a model. Files have the factors of the active stream also if the
    model does not use them."""
    unused = unused_names(spec)
    if spec.altup is not None and not spec.altup.scaled:
        unused += tuple(NAMES["altup_scale"].format(i=index) for index in range(spec.num_layers))
    return names_of(NAMES, endings={"altup_scale": ("", "")}, unused=unused)


DEFAULTS_3N: dict[str, Any] = {
    key: value for key, value in DEFAULTS.items() if key != "hidden_act"
} | {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "rope_theta": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 512,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
    "activation_sparsity_pattern": None,
}
FAMILIES = (
    ModelFamily(
        architecture="Gemma3nForCausalLM",
        model_type="gemma3n_text",
        defaults=DEFAULTS_3N,
        nullable=frozenset({"final_logit_softcapping"}),
        read=read_gemma3n,
        names=gemma3n_names,
    ),
)
