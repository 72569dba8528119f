"""The families of Qwen: Qwen2 and Qwen2.5 (with biases), Qwen3 and Qwen3-MoE (with norms of
queries and keys)."""

from __future__ import annotations

from worker.errors import UnusableModel
from worker.spec.families.family import DEFAULTS, FULL, SLIDING, ConfigFields, ModelFamily
from worker.spec.model_spec import LayerSpec, MlpSpec, ModelSpec
from worker.spec.tensor_names import names_of


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


def read_qwen3_moe(config: ConfigFields) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = config.attention(
        config.rope(),
        window=config.window if config.flag("use_sliding_window") else None,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
    )
    dense = config.mlp()
    experts = config.mlp(
        intermediate=config.integer("moe_intermediate_size"),
        num_experts=config.integer("num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        renormalize=config.flag("norm_topk_prob"),
    )
    step, without = max(config.integer("decoder_sparse_step"), 1), config.get("mlp_only_layers", [])
    if not isinstance(without, list):
        raise UnusableModel(f"config.json: 'mlp_only_layers' is {without!r:.80}, not a list")

    def mlp(index: int) -> MlpSpec:
        return dense if index in without or (index + 1) % step else experts

    layers = [LayerSpec(attention=attention, mlp=mlp(i)) for i in range(config.num_layers)]
    return config.model(layers, config.rms_norm())


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
NULLABLE = frozenset({"num_key_value_heads", "sliding_window"})
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
)
