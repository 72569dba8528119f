"""The families of Qwen: Qwen2, Qwen2.5 and Qwen2-MoE (with biases), Qwen3 and Qwen3-MoE (with
norms of queries and keys), and the hybrids Qwen3-Next and Qwen3.5 to 3.8."""

from __future__ import annotations

from collections.abc import Callable

from worker.errors import UnusableModel
from worker.spec import draft_head
from worker.spec.families.family import (
    DEFAULTS,
    FULL,
    LINEAR,
    SLIDING,
    ConfigFields,
    ModelFamily,
    every,
)
from worker.spec.model_spec import LayerSpec, MlpSpec, ModelSpec
from worker.spec.recurrent import GatedDeltaSpec
from worker.spec.tensor_names import RowOrder, TensorNames, names_of


def _windows(config: ConfigFields) -> list[int | None]:
    window = config.window if config.flag("use_sliding_window") else None
    first = config.integer("max_window_layers")
    kinds = config.layer_types(
        lambda index: SLIDING if window is not None and index >= first else FULL
    )
    return [window if kind == SLIDING else None for kind in kinds]


def read_qwen2(config: ConfigFields) -> ModelSpec:
    rope, mlp = config.rope(), config.mlp()
    layers = [
        LayerSpec(attention=config.attention(rope, window=window, qkv_bias=True), mlp=mlp)
        for window in _windows(config)
    ]
    return config.model(layers, config.rms_norm())


def read_qwen3(config: ConfigFields) -> ModelSpec:
    rope, mlp, bias = config.rope(), config.mlp(), config.flag("attention_bias")
    layers = [
        LayerSpec(
            attention=config.attention(
                rope, window=window, qkv_bias=bias, output_bias=bias, qk_norm="head"
            ),
            mlp=mlp,
        )
        for window in _windows(config)
    ]
    return config.model(layers, config.rms_norm())


def _sparse(config: ConfigFields, experts: MlpSpec) -> Callable[[int], MlpSpec]:
    """Return a function from a layer's index to its MLP: `experts` in some layers."""
    dense = config.mlp()
    step, without = max(config.integer("decoder_sparse_step"), 1), config.get("mlp_only_layers", [])
    if not isinstance(without, list):
        raise UnusableModel(f"config.json: 'mlp_only_layers' is {without!r:.80}, not a list")
    return lambda index: dense if index in without or (index + 1) % step else experts


def read_qwen3_moe(config: ConfigFields) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = config.attention(
        config.rope(),
        window=config.window if config.flag("use_sliding_window") else None,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
    )
    experts = config.mlp(
        intermediate=config.integer("moe_intermediate_size"),
        num_experts=config.integer("num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        renormalize=config.flag("norm_topk_prob"),
    )
    mlp = _sparse(config, experts)
    layers = [LayerSpec(attention=attention, mlp=mlp(i)) for i in range(config.num_layers)]
    return config.model(layers, config.rms_norm())


def read_qwen2_moe(config: ConfigFields) -> ModelSpec:
    rope, bias = config.rope(), config.flag("qkv_bias")
    slides, last = config.flag("use_sliding_window"), config.integer("max_window_layers")
    kinds = config.layer_types(
        lambda index: SLIDING if slides and index < last and not index % 2 else FULL
    )
    windows = [config.window if slides and kind == SLIDING else None for kind in kinds]
    experts = _experts(config, renormalize=config.flag("norm_topk_prob"))
    mlp = _sparse(config, experts)
    layers = [
        LayerSpec(attention=config.attention(rope, window=window, qkv_bias=bias), mlp=mlp(index))
        for index, window in enumerate(windows)
    ]
    return config.model(layers, config.rms_norm())


def _linear_layers(config: ConfigFields) -> list[bool]:
    """Return whether each layer of a hybrid has linear attention."""
    default = every(config.integer("full_attention_interval", 4), regular=LINEAR)
    return [kind == LINEAR for kind in config.layer_types(default, known=(FULL, LINEAR))]


def _hybrid(config: ConfigFields, mlp: Callable[[int], MlpSpec]) -> ModelSpec:
    """Return a model in which gated delta nets alternate with attention that has gates."""
    bias = config.flag("attention_bias")
    attention = config.attention(
        config.rope(partial=0.25),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        gated=True,
    )
    delta = GatedDeltaSpec(
        num_key_heads=config.integer("linear_num_key_heads"),
        num_value_heads=config.integer("linear_num_value_heads"),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim"),
        eps=config.number("rms_norm_eps"),
    )
    layers = [
        LayerSpec(recurrent=delta, mlp=mlp(index))
        if is_linear
        else LayerSpec(attention=attention, mlp=mlp(index))
        for index, is_linear in enumerate(_linear_layers(config))
    ]
    return config.model(layers, config.rms_norm(offset=1.0))


def read_qwen3_5(config: ConfigFields) -> ModelSpec:
    dense = config.mlp()
    return _hybrid(config, lambda index: dense)


def read_qwen3_5_moe(config: ConfigFields) -> ModelSpec:
    experts = _experts(config, renormalize=True)
    return _hybrid(config, lambda index: experts)


def read_qwen3_next(config: ConfigFields) -> ModelSpec:
    return _hybrid(
        config, _sparse(config, _experts(config, renormalize=config.flag("norm_topk_prob")))
    )


def _experts(config: ConfigFields, *, renormalize: bool) -> MlpSpec:
    """Return the experts of a layer with a shared one."""
    return config.mlp(
        intermediate=config.integer("moe_intermediate_size"),
        num_experts=config.integer("num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        renormalize=renormalize,
        shared=config.integer("shared_expert_intermediate_size"),
    )


DELTA_NAMES = {
    "delta_qkv": "model.layers.{i}.linear_attn.in_proj_qkv",
    "delta_z": "model.layers.{i}.linear_attn.in_proj_z",
    "delta_b": "model.layers.{i}.linear_attn.in_proj_b",
    "delta_a": "model.layers.{i}.linear_attn.in_proj_a",
    "delta_qkvz": "model.layers.{i}.linear_attn.in_proj_qkvz",
    "delta_ba": "model.layers.{i}.linear_attn.in_proj_ba",
    "delta_conv": "model.layers.{i}.linear_attn.conv1d",
    "delta_decay": "model.layers.{i}.linear_attn.A_log",
    "delta_bias": "model.layers.{i}.linear_attn.dt_bias",
    "delta_norm": "model.layers.{i}.linear_attn.norm",
    "delta_output": "model.layers.{i}.linear_attn.out_proj",
}
SHARED_NAMES = {
    "shared_gate": "model.layers.{i}.mlp.shared_expert.gate_proj",
    "shared_up": "model.layers.{i}.mlp.shared_expert.up_proj",
    "shared_down": "model.layers.{i}.mlp.shared_expert.down_proj",
    "shared_score": "model.layers.{i}.mlp.shared_expert_gate",
}
FUSED = {"delta_qkvz", "delta_ba"}
SEPARATE = {"delta_qkv", "delta_z", "delta_b", "delta_a"}


def _hybrid_names(spec: ModelSpec, without: set[str]) -> TensorNames:
    """Return the names of a hybrid's tensors, without some roles. The rows of each head's query and
    of its gate are next to each other."""
    roles = {role: name for role, name in DELTA_NAMES.items() if role not in without}
    endings = dict.fromkeys(("delta_decay", "delta_bias"), ("", ""))
    orders = {}
    if spec.attentions:
        attention = spec.attentions[0]
        orders = {"q": RowOrder((attention.num_heads, 2, attention.head_dim), (1, 0, 2))}
    return names_of(roles, SHARED_NAMES, orders=orders, endings=endings, unused=("mtp.",))


QWEN2_DEFAULTS = DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
HYBRID_DEFAULTS = DEFAULTS | {
    "vocab_size": 248320,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
}
NULLABLE = frozenset({"num_key_value_heads", "sliding_window"})
SILU = {"hidden_act": ("silu", "swish")}
"""The activation of hybrids: it is also that of their convolutions, which compute no other."""
FAMILIES = (
    ModelFamily(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        defaults=QWEN2_DEFAULTS,
        nullable=NULLABLE,
        read=read_qwen2,
        names=lambda spec: names_of(),
    ),
    ModelFamily(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        defaults=DEFAULTS
        | {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "layer_types": None,
            "qkv_bias": True,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
        },
        nullable=NULLABLE,
        read=read_qwen2_moe,
        names=lambda spec: names_of(SHARED_NAMES),
    ),
    ModelFamily(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        defaults=QWEN2_DEFAULTS | {"head_dim": 128, "attention_bias": False},
        nullable=NULLABLE,
        read=read_qwen3,
        names=lambda spec: names_of(),
    ),
    ModelFamily(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        defaults=DEFAULTS
        | {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
        },
        nullable=frozenset({"sliding_window"}),
        aliases={"num_local_experts": "num_experts"},
        read=read_qwen3_moe,
        names=lambda spec: names_of(),
    ),
    ModelFamily(
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        defaults=HYBRID_DEFAULTS
        | {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
            "mlp_only_layers": None,
        },
        aliases={"num_local_experts": "num_experts"},
        only=SILU,
        read=read_qwen3_next,
        names=lambda spec: _hybrid_names(spec, SEPARATE),
        draft_head=draft_head.of_qwen,
    ),
    ModelFamily(
        architecture="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        defaults=HYBRID_DEFAULTS,
        only=SILU,
        read=read_qwen3_5,
        names=lambda spec: _hybrid_names(spec, FUSED),
        draft_head=draft_head.of_qwen,
    ),
    ModelFamily(
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        defaults={
            key: value for key, value in HYBRID_DEFAULTS.items() if key != "intermediate_size"
        }
        | {
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        aliases={"num_local_experts": "num_experts"},
        only=SILU,
        read=read_qwen3_5_moe,
        names=lambda spec: _hybrid_names(spec, FUSED),
        draft_head=draft_head.of_qwen,
    ),
)
