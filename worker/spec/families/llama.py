"""Llama, and families that differ from it only by biases, factors or layers without positions:
SmolLM2 and Falcon 3 (both are Llama in their configs), SmolLM3, Granite 3 and 4, and Seed-OSS. Some
models of Granite have experts. Granite 4 H also has layers with Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from worker.errors import UnusableModel
from worker.spec.families.family import DEFAULTS, FULL, LINEAR, SLIDING, ConfigFields, ModelFamily
from worker.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from worker.spec.recurrent import Mamba2Spec
from worker.spec.rope_config import RopeConfig
from worker.spec.tensor_names import TensorNames, names_of


def read_llama(config: ConfigFields) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = config.attention(config.rope(), qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(attention=attention, mlp=config.mlp(bias=config.flag("mlp_bias")))
    return config.model([layer] * config.num_layers, config.rms_norm())


def read_arcee(config: ConfigFields) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = config.attention(config.rope(), qkv_bias=bias, output_bias=bias)
    mlp = config.mlp(bias=config.flag("mlp_bias"), is_gated=False)
    return config.model(
        [LayerSpec(attention=attention, mlp=mlp)] * config.num_layers, config.rms_norm()
    )


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
    layer = LayerSpec(attention=_granite_attention(config, config.rope()), mlp=mlp)
    return _granite(config, [layer] * config.num_layers)


def read_granite_moe(config: ConfigFields) -> ModelSpec:
    return _granite_moe(config, _granite_experts(config))


def read_granite_moe_shared(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Granite 3 with experts and a shared MLP describes."""
    return _granite_moe(config, _granite_experts(config, config.integer(SHARED_SIZE)))


def _granite_moe(config: ConfigFields, experts: MlpSpec) -> ModelSpec:
    layer = LayerSpec(attention=_granite_attention(config, config.rope()), mlp=experts)
    return _granite(config, [layer] * config.num_layers)


def _granite_experts(config: ConfigFields, shared: int = 0) -> MlpSpec:
    """Return the spec of the experts.

    shared   size of the MLP beside them; 0: there is none
    """
    return config.mlp(
        num_experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        shared=shared,
        scores_shared=False,
    )


def read_granite_hybrid(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Granite 4 describes: some of its layers have Mamba-2, the
    others attention. Raises UnusableModel, naming the field, if a value is not supported.

    Without experts, a layer has only the shared MLP, so `shared_intermediate_size` is read instead
    of `intermediate_size`.
    """
    kinds = config.layer_types(lambda index: LINEAR, known=(FULL, LINEAR))
    rope = config.rope() if config.get("position_embedding_type") == "rope" else None
    shared = config.integer(SHARED_SIZE)
    if config.integer("num_local_experts"):
        mlp = _granite_experts(config, shared)
    else:
        mlp = config.mlp(intermediate=shared)
    attention = LayerSpec(attention=_granite_attention(config, rope), mlp=mlp)
    mamba = attention
    if LINEAR in kinds:
        mamba = LayerSpec(recurrent=mamba_of_config(config), mlp=mlp)
    return _granite(config, [mamba if kind == LINEAR else attention for kind in kinds])


def mamba_of_config(config: ConfigFields) -> Mamba2Spec:
    """Return the Mamba-2 of a config, as in Granite 4 and Bamba. Raises UnusableModel, naming the
    field, if a value is not supported."""
    heads, width = config.integer("mamba_n_heads"), config.integer("mamba_expand")
    head_dim, width = config.get("mamba_d_head"), width * config.integer("hidden_size")
    if head_dim in ("auto", None):
        head_dim = width // max(heads, 1)
    if not isinstance(head_dim, int) or head_dim * heads != width:
        raise UnusableModel(
            f"mamba_d_head {head_dim!r:.80} times mamba_n_heads {heads} is not {width}, which is "
            "mamba_expand times hidden_size"
        )
    return Mamba2Spec(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=config.integer("mamba_n_groups"),
        state=config.integer("mamba_d_state"),
        kernel=config.integer("mamba_d_conv"),
        eps=config.number("rms_norm_eps"),
        conv_bias=config.flag("mamba_conv_bias"),
        bias=config.flag("mamba_proj_bias"),
        limits=config.limits("time_step_limit"),
    )


def _granite_attention(config: ConfigFields, rope: RopeConfig | None) -> AttentionSpec:
    bias, scale = config.flag("attention_bias"), config.number("attention_multiplier")
    return config.attention(rope, qkv_bias=bias, output_bias=bias, scale=scale)


def _granite(config: ConfigFields, layers: Sequence[LayerSpec]) -> ModelSpec:
    return config.model(
        layers,
        config.rms_norm(),
        embedding_scale=config.number("embedding_multiplier"),
        image_scale=config.number("embedding_multiplier"),
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


SHARED_SIZE = "shared_intermediate_size"
"""Key of the size of the shared MLP."""
BIASES = {"attention_bias": False, "mlp_bias": False}
MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
GRANITE_MOE = MULTIPLIERS | {
    "attention_bias": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MAMBA_NAMES = {
    "mamba_inputs": "model.layers.{i}.mamba.in_proj",
    "mamba_conv": "model.layers.{i}.mamba.conv1d",
    "mamba_decay": "model.layers.{i}.mamba.A_log",
    "mamba_bias": "model.layers.{i}.mamba.dt_bias",
    "mamba_skip": "model.layers.{i}.mamba.D",
    "mamba_norm": "model.layers.{i}.mamba.norm",
    "mamba_output": "model.layers.{i}.mamba.out_proj",
}
MAMBA_WITHOUT_ENDING = ("mamba_decay", "mamba_bias", "mamba_skip")
"""Roles whose names have no ending."""
GRANITE_4_NAMES = {
    **MAMBA_NAMES,
    "router": "model.layers.{i}.block_sparse_moe.router.layer",
    "expert_gate_up": "model.layers.{i}.block_sparse_moe.input_linear",
    "expert_down": "model.layers.{i}.block_sparse_moe.output_linear",
}


def granite_hybrid_names(spec: ModelSpec) -> TensorNames:
    """Return the tensor names. The shared MLP is the only one of a layer without experts."""
    prefix = "" if spec.mlps[0].num_experts == 1 else "shared_"
    shared = {
        f"{prefix}gate_up": "model.layers.{i}.shared_mlp.input_linear",
        f"{prefix}down": "model.layers.{i}.shared_mlp.output_linear",
    }
    endings = dict.fromkeys(MAMBA_WITHOUT_ENDING, ("", ""))
    return names_of(GRANITE_4_NAMES, shared, endings=endings)


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
        architecture="ArceeForCausalLM",
        model_type="arcee",
        defaults=DEFAULTS
        | BIASES
        | {
            "hidden_size": 2560,
            "intermediate_size": 18432,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        read=read_arcee,
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
        architecture="GraniteMoeForCausalLM",
        model_type="granitemoe",
        defaults=DEFAULTS | GRANITE_MOE,
        read=read_granite_moe,
        names=granite_hybrid_names,
    ),
    ModelFamily(
        architecture="GraniteMoeSharedForCausalLM",
        model_type="granitemoeshared",
        defaults=DEFAULTS | GRANITE_MOE | {SHARED_SIZE: 0},
        needed={SHARED_SIZE: 1024},
        read=read_granite_moe_shared,
        names=granite_hybrid_names,
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
            SHARED_SIZE: 1024,
            "position_embedding_type": None,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "time_step_limit": (0.0, inf),
        },
        only={
            "position_embedding_type": ("rope", "nope", None),
            "hidden_act": ("silu", "swish"),  # it is also that of the convolutions
        },
        aliases={"layers_block_type": "layer_types"},
        needed={"layer_types": [LINEAR] * 31 + [FULL]},
        read=read_granite_hybrid,
        names=granite_hybrid_names,
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
