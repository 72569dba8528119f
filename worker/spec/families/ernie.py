"""The families of Ernie 4.5, whose rotary embeddings turn neighbouring items of each head."""

from __future__ import annotations

from dataclasses import replace

from worker.errors import UnusableModel
from worker.spec.families.family import DEFAULTS, ConfigFields, ModelFamily
from worker.spec.families.glm import SHARED_NAMES, with_choice_bias
from worker.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from worker.spec.tensor_names import TensorNames, names_of, neighbour_orders


def read_ernie4_5(config: ConfigFields) -> ModelSpec:
    mlp = config.mlp(bias=config.flag("use_bias"))
    layer = LayerSpec(attention=_attention(config), mlp=mlp)
    return config.model([layer] * config.num_layers, config.rms_norm())


def read_ernie4_5_moe(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Ernie 4.5 with experts describes.

    `moe_norm_min` is not read: it is a bound, 1e-12 in published configs, below the sum by which
    the weights of the chosen experts are divided.
    """
    first, last = config.integer("moe_layer_start_index"), config.integer("moe_layer_end_index")
    step, size = config.integer("moe_layer_interval"), config.integer("moe_intermediate_size")
    if step < 1:
        raise UnusableModel(f"moe_layer_interval is {step}; it must be above zero")
    if last == -1:
        last = config.num_layers - 1
    attention, dense = _attention(config), config.mlp()
    experts = config.mlp(
        intermediate=size,
        num_experts=config.integer("moe_num_experts"),
        top_k=config.integer("moe_k"),
        choice_bias=True,
        shared=size * config.integer("moe_num_shared_experts"),
        scores_shared=False,
    )
    layers = [
        LayerSpec(
            attention=attention,
            mlp=experts if first <= index <= last and not (index + 1) % step else dense,
        )
        for index in range(config.num_layers)
    ]
    return config.model(layers, config.rms_norm())


def _attention(config: ConfigFields) -> AttentionSpec:
    bias = config.flag("use_bias")
    return config.attention(config.rope(), qkv_bias=bias, output_bias=bias)


def ernie4_5_moe_names(spec: ModelSpec) -> TensorNames:
    name = "mlp.moe_statics.e_score_correction_bias"
    names = with_choice_bias(spec, SHARED_NAMES, name=name)
    # Published files have the tensors for drafts beside the layers.
    return replace(names, orders=neighbour_orders(spec), unused=("model.mtp_",))


ERNIE_DEFAULTS = DEFAULTS | {
    "vocab_size": 103424,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}
FAMILIES = (
    ModelFamily(
        architecture="Ernie4_5ForCausalLM",
        model_type="ernie4_5",
        defaults=ERNIE_DEFAULTS
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
        },
        nullable=frozenset({"num_key_value_heads", "head_dim"}),
        read=read_ernie4_5,
        names=lambda spec: names_of(orders=neighbour_orders(spec)),
    ),
    ModelFamily(
        architecture="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        defaults=ERNIE_DEFAULTS
        | {
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_hidden_layers": 28,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        nullable=frozenset({"num_key_value_heads"}),
        only={"use_bias": (False,)},  # the head would have biases too
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        read=read_ernie4_5_moe,
        names=ernie4_5_moe_names,
    ),
)
