"""The text model of Llama 4. Most layers rotate queries and keys, and their tokens see only their
own chunk of the text; the others do neither. Some or all layers have experts."""

from __future__ import annotations

from worker.errors import UnusableModel
from worker.spec.families.family import DEFAULTS, FULL, ConfigFields, ModelFamily
from worker.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from worker.spec.rope_config import QueryGrowth
from worker.spec.tensor_names import TensorNames, names_of, neighbour_orders

CHUNKED = "chunked_attention"


def read_llama4(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Llama 4 describes. Raises UnusableModel, naming the field,
    if a value is not supported."""
    rotated, with_experts = _rotated(config), _with_experts(config)
    has_chunks = config.get("attention_chunk_size") is not None
    kinds = config.layer_types(
        lambda index: CHUNKED if rotated[index] and has_chunks else FULL, known=(FULL, CHUNKED)
    )
    dense = config.mlp(intermediate=config.integer("intermediate_size_mlp"))
    experts = config.mlp(
        num_experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        router="sigmoid",
        renormalize=False,
        weighs_inputs=True,
        shared=config.integer("intermediate_size"),
        scores_shared=False,
    )
    if with_experts and experts.num_experts < 2:
        raise UnusableModel(f"num_local_experts is {experts.num_experts}; it must be above one")
    layers = [
        LayerSpec(
            attention=_attention(config, is_rotated, kind == CHUNKED),
            mlp=experts if index in with_experts else dense,
        )
        for index, (is_rotated, kind) in enumerate(zip(rotated, kinds, strict=True))
    ]
    return config.model(layers, config.rms_norm())


def _attention(config: ConfigFields, is_rotated: bool, has_chunks: bool) -> AttentionSpec:
    bias, has_norms = config.flag("attention_bias"), config.flag("use_qk_norm") and is_rotated
    growth = None
    if _is_on(config, "attn_temperature_tuning") and not is_rotated:
        tokens = _above_zero(config, "floor_scale")
        growth = QueryGrowth(config.number("attn_scale"), tokens, offset=1)
    return config.attention(
        config.rope() if is_rotated else None,
        chunk=_above_zero(config, "attention_chunk_size") if has_chunks else None,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="plain" if has_norms else "none",
        norms_rotated=has_norms,
        growth=growth,
    )


def _is_on(config: ConfigFields, key: str) -> bool:
    """Return a flag, which older configs store as a number: above zero, it is on."""
    value = config.get(key)
    return value > 0 if isinstance(value, int) else config.flag(key)


def _rotated(config: ConfigFields) -> list[bool]:
    """Return whether each layer rotates queries and keys. An empty list in the config means that
    every `no_rope_layer_interval`-th layer does not."""
    count, name = config.num_layers, "no_rope_layers"
    found = config.get(name)
    if not found:
        interval = _above_zero(config, "no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(found, list) or len(found) != count or not {*map(str, found)} <= {"0", "1"}:
        raise UnusableModel(f"{name} must have a 0 or a 1 for each of the {count} layers")
    return [each == 1 for each in found]


def _with_experts(config: ConfigFields) -> set[int]:
    """Return the indexes of the layers with experts."""
    count, found = config.num_layers, config.get("moe_layers")
    if found is None:
        step = _above_zero(config, "interleave_moe_layer_step")
        return set(range(step - 1, count, step))
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise UnusableModel(f"moe_layers is {found!r:.80}, not a list of integers")
    return set(found)


def _above_zero(config: ConfigFields, name: str) -> int:
    if (value := config.integer(name)) < 1:
        raise UnusableModel(f"{name} is {value}; it must be above zero")
    return value


FEED_FORWARD = "model.layers.{i}.feed_forward."
NAMES = {
    **{role: f"{FEED_FORWARD}{role}_proj" for role in ("gate", "up", "down")},
    **{
        f"shared_{role}": f"{FEED_FORWARD}shared_expert.{role}_proj"
        for role in ("gate", "up", "down")
    },
    "router": FEED_FORWARD + "router",
    "expert_gate_up": FEED_FORWARD + "experts.gate_up_proj",
    "expert_down": FEED_FORWARD + "experts.down_proj",
}
STACKED = ("expert_gate_up", "expert_down")
"""Roles of tensors that hold all experts of a layer, as [expert, in, out]."""


def llama4_names(spec: ModelSpec) -> TensorNames:
    return names_of(
        NAMES,
        orders=neighbour_orders(spec),
        transposed=frozenset(STACKED),
        endings=dict.fromkeys(STACKED, ("", "")),
    )


FAMILIES = (
    ModelFamily(
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        defaults=DEFAULTS
        | {
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "layer_types": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "attention_bias": False,
        },
        nullable=frozenset({"num_key_value_heads", "head_dim", "attention_chunk_size"}),
        read=read_llama4,
        names=llama4_names,
    ),
)
