"""Llama, and families that differ from it only by biases, factors or layers without positions:
SmolLM2 and Falcon 3 (both are Llama in their configs), SmolLM3, Granite 3, dense Granite 4 and
Seed-OSS."""

from __future__ import annotations

from worker.errors import UnusableModel
from worker.spec.families.family import DEFAULTS, FULL, SLIDING, ConfigFields, ModelFamily
from worker.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from worker.spec.rope_config import RopeConfig
from worker.spec.tensor_names import names_of


def read_llama(config: ConfigFields) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = config.attention(config.rope(), qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(attention=attention, mlp=config.mlp(bias=config.flag("mlp_bias")))
    return config.model([layer] * config.num_layers, config.rms_norm())


def read_seed_oss(config: ConfigFields) -> ModelSpec:
    attention = config.attention(
        config.rope(),
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_out_bias"),
    )
    layer = LayerSpec(attention=attention, mlp=config.mlp(bias=config.flag("mlp_bias")))
    return config.model([layer] * config.num_layers, config.rms_norm())


def read_granite(config: ConfigFields) -> ModelSpec:
    mlp = config.mlp(bias=config.flag("mlp_bias"))
    return _granite(config, LayerSpec(attention=_granite_attention(config, config.rope()), mlp=mlp))


def read_granite_hybrid(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Granite 4 describes. Raises UnusableModel, naming the
    field, if some layers are state-space layers, if it has experts, or if layers have windows.

    Without experts, a layer has only the shared MLP, so `shared_intermediate_size` is read instead
    of `intermediate_size`.
    """
    if SLIDING in config.layer_types(lambda index: LINEAR):
        raise UnusableModel(
            f"layers of type {SLIDING!r} are not supported for {config.architecture}"
        )
    if experts := config.integer("num_local_experts"):
        raise UnusableModel(
            f"num_local_experts {experts} is not supported for {config.architecture}: only models "
            "without experts are"
        )
    rope = config.rope() if config.get("position_embedding_type") == "rope" else None
    mlp = config.mlp(intermediate=config.integer("shared_intermediate_size"))
    return _granite(config, LayerSpec(attention=_granite_attention(config, rope), mlp=mlp))


def _granite_attention(config: ConfigFields, rope: RopeConfig | None) -> AttentionSpec:
    bias, scale = config.flag("attention_bias"), config.number("attention_multiplier")
    return config.attention(rope, qkv_bias=bias, output_bias=bias, scale=scale)


def _granite(config: ConfigFields, layer: LayerSpec) -> ModelSpec:
    return config.model(
        [layer] * config.num_layers,
        config.rms_norm(),
        embedding_scale=config.number("embedding_multiplier"),
        residual_scale=config.number("residual_multiplier"),
        logits_scale=1.0 / config.positive("logits_scaling"),
    )


def read_smollm3(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of SmolLM3 describes. Some of its layers have no rotary
    embeddings. Raises UnusableModel, naming the field, if a value is not supported.

    Despite its name, `no_rope_layers` has 1 for a layer with rotary embeddings and 0 for one
    without. Without this key, every `no_rope_layer_interval`-th layer has none.
    """
    bias, mlp = config.flag("attention_bias"), config.mlp(bias=config.flag("mlp_bias"))
    window = config.window if config.flag("use_sliding_window") else None
    rotates = config.get("no_rope_layers")
    if rotates is None:
        interval = max(config.integer("no_rope_layer_interval"), 1)
        rotates = [(index + 1) % interval != 0 for index in range(config.num_layers)]
    if not isinstance(rotates, list) or len(rotates) != config.num_layers:
        raise UnusableModel(f"no_rope_layers must be a list of {config.num_layers} layers")
    kinds = config.layer_types(
        lambda index: SLIDING if window is not None and not rotates[index] else FULL
    )
    rope = config.rope()
    layers = [
        LayerSpec(
            attention=config.attention(
                rope if is_rotated else None,
                window=window if kind == SLIDING else None,
                qkv_bias=bias,
                output_bias=bias,
            ),
            mlp=mlp,
        )
        for kind, is_rotated in zip(kinds, rotates, strict=True)
    ]
    return config.model(layers, config.rms_norm())


BIASES = {"attention_bias": False, "mlp_bias": False}
LINEAR = "linear_attention"
"""Kind of all layers if a config of Granite 4 has no list of kinds: state-space layers."""
MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
GRANITE_4_NAMES = {
    "gate_up": "model.layers.{i}.shared_mlp.input_linear",
    "down": "model.layers.{i}.shared_mlp.output_linear",
}
FAMILIES = (
    ModelFamily(
        architecture="LlamaForCausalLM",
        model_type="llama",
        defaults=DEFAULTS | BIASES,
        ignored={"sliding_window": None},
        read=read_llama,
        names=lambda spec: names_of(),
    ),
    ModelFamily(
        architecture="GraniteForCausalLM",
        model_type="granite",
        defaults=DEFAULTS | BIASES | MULTIPLIERS,
        read=read_granite,
        names=lambda spec: names_of(),
    ),
    ModelFamily(
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        defaults=DEFAULTS
        | MULTIPLIERS
        | {
            "attention_bias": False,
            "layer_types": None,
            "num_local_experts": 8,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
        },
        only={"position_embedding_type": ("rope", "nope", None)},
        aliases={"layers_block_type": "layer_types"},
        needed={"layer_types": [FULL] * 32, "num_local_experts": 0},
        read=read_granite_hybrid,
        names=lambda spec: names_of(GRANITE_4_NAMES),
    ),
    ModelFamily(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        defaults=DEFAULTS
        | {
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
        nullable=frozenset({"num_key_value_heads", "head_dim"}),
        read=read_seed_oss,
        names=lambda spec: names_of(),
    ),
    ModelFamily(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        defaults=DEFAULTS
        | BIASES
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        nullable=frozenset({"num_key_value_heads"}),
        read=read_smollm3,
        names=lambda spec: names_of(),
    ),
)
