"""Falcon-H1, whose layers have attention and Mamba-2 side by side, and factors everywhere."""

from __future__ import annotations

from math import inf

from worker.errors import UnusableModel
from worker.spec.families.family import DEFAULTS, ConfigFields, ModelFamily
from worker.spec.families.llama import MAMBA_NAMES, MAMBA_WITHOUT_ENDING
from worker.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from worker.spec.recurrent import Mamba2Spec
from worker.spec.tensor_names import names_of


def read_falcon_h1(config: ConfigFields) -> ModelSpec:
    gate_scale, down_scale = _numbers(config, "mlp_multipliers", 2)
    mlp = config.mlp(bias=config.flag("mlp_bias"), gate_scale=gate_scale, result_scale=down_scale)
    layer = LayerSpec(attention=_attention(config), recurrent=_mamba(config), mlp=mlp)
    return config.model(
        [layer] * config.num_layers,
        config.rms_norm(),
        embedding_scale=config.number("embedding_multiplier"),
        logits_scale=config.number("lm_head_multiplier"),
    )


def _attention(config: ConfigFields) -> AttentionSpec:
    """Return the attention. The factor of its input is that of queries, keys and values, because
    these have no biases then. Scores have the factors of queries and keys, and results that of
    values."""
    bias, factor = config.flag("attention_bias"), config.number("attention_in_multiplier")
    _check_input(factor, "attention_in_multiplier", bias, "attention_bias")
    scale = max(config.head_dim, 1) ** -0.5 * config.number("key_multiplier") * factor**2
    return config.attention(
        config.rope(),
        qkv_bias=bias,
        output_bias=bias,
        scale=scale,
        result_scale=config.number("attention_out_multiplier") * factor,
    )


def _mamba(config: ConfigFields) -> Mamba2Spec:
    bias, factor = config.flag("mamba_proj_bias"), config.number("ssm_in_multiplier")
    _check_input(factor, "ssm_in_multiplier", bias, "mamba_proj_bias")
    if config.flag("projectors_bias") != bias:
        raise UnusableModel("projectors_bias must be equal to mamba_proj_bias")
    heads, head_dim = config.integer("mamba_n_heads"), config.get("mamba_d_head")
    expanded = config.integer("mamba_expand") * config.integer("hidden_size")
    width = config.integer("mamba_d_ssm", expanded)
    if head_dim in ("auto", None):
        head_dim = width // max(heads, 1)
    if not isinstance(head_dim, int) or head_dim * heads != width:
        raise UnusableModel(
            f"mamba_d_head {head_dim!r:.80} times mamba_n_heads {heads} is not {width}, the width "
            "of the Mamba layers"
        )
    gate, x, b, c, step = (factor * each for each in _numbers(config, "ssm_multipliers", 5))
    is_before = config.flag("mamba_norm_before_gate")
    return Mamba2Spec(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=config.integer("mamba_n_groups"),
        state=config.integer("mamba_d_state"),
        kernel=config.integer("mamba_d_conv"),
        eps=config.number("rms_norm_eps"),
        conv_bias=config.flag("mamba_conv_bias"),
        bias=bias,
        limits=config.limits("time_step_limit"),
        norm=("before gate" if is_before else "after gate")
        if config.flag("mamba_rms_norm")
        else None,
        input_scales=(gate, x, b, c, step),
        result_scale=config.number("ssm_out_multiplier"),
    )


def _check_input(factor: float, key: str, bias: bool, bias_key: str) -> None:
    """Raise UnusableModel if a linear has a factor of its input, and biases."""
    if bias and factor != 1.0:
        raise UnusableModel(f"{key} {factor} is not supported with {bias_key}")


def _numbers(config: ConfigFields, key: str, count: int) -> list[float]:
    """Return a list of numbers: ones if it is null."""
    found = config.get(key, [1.0] * count)
    if (
        not isinstance(found, list)
        or len(found) != count
        or not all(isinstance(each, int | float) and abs(each) < inf for each in found)
    ):
        raise UnusableModel(f"config.json: {key!r} is {found!r:.80}, not {count} numbers")
    return [float(each) for each in found]


NAMES = {
    **MAMBA_NAMES,
    "norm": "model.final_layernorm",
    "mlp_norm": "model.layers.{i}.pre_ff_layernorm",
    "gate": "model.layers.{i}.feed_forward.gate_proj",
    "up": "model.layers.{i}.feed_forward.up_proj",
    "down": "model.layers.{i}.feed_forward.down_proj",
}
FAMILIES = (
    ModelFamily(
        architecture="FalconH1ForCausalLM",
        model_type="falcon_h1",
        defaults=DEFAULTS
        | {
            "vocab_size": 128000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "projectors_bias": False,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "time_step_limit": (0.0, inf),
            "lm_head_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "mlp_multipliers": None,
            "key_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "attention_in_multiplier": 1.0,
            "ssm_multipliers": None,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
        },
        only={"hidden_act": ("silu", "swish")},
        nullable=frozenset({"num_key_value_heads", "mamba_d_ssm", "time_step_limit"}),
        read=read_falcon_h1,
        names=lambda spec: names_of(NAMES, endings=dict.fromkeys(MAMBA_WITHOUT_ENDING, ("", ""))),
    ),
)
