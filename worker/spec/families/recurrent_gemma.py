"""RecurrentGemma, whose layers have an RG-LRU or attention with a window, and an MLP (Griffin)."""

from __future__ import annotations

import struct
from itertools import cycle, islice

from worker.errors import UnusableModel
from worker.spec.families.family import DEFAULTS, UNLIMITED_CONTEXT, ConfigFields, ModelFamily
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.recurrent import RgLruSpec
from worker.spec.rope_config import NoScaling
from worker.spec.tensor_names import LRU_GATES, TensorNames, names_of

RECURRENT, ATTENTION = "recurrent", "attention"


def read_recurrent_gemma(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of RecurrentGemma describes. Raises UnusableModel, naming the
    field, if a value is not supported.

    The config has the intermediate size of both halves of the MLP's first matrix together.
    """
    rope, activation = config.rope(partial=0.5), config.activation("hidden_activation")
    if not isinstance(rope.scaling, NoScaling):
        raise UnusableModel(f"scaled rotary embeddings are not supported for {config.architecture}")
    attention = config.attention(
        rope,
        window=config.integer("attention_window_size"),
        qkv_bias=config.flag("attention_bias"),
        output_bias=True,
    )
    lru, width = _rg_lru(config), config.integer("intermediate_size") // 2
    mlp = config.mlp(intermediate=width, activation=activation, bias=True)
    layers = {
        RECURRENT: LayerSpec(recurrent=lru, mlp=mlp),
        ATTENTION: LayerSpec(attention=attention, mlp=mlp),
    }
    return config.model(
        [layers[kind] for kind in _kinds(config)],
        config.rms_norm(offset=1.0),
        context_tokens=config.integer("max_position_embeddings", UNLIMITED_CONTEXT),
        embedding_scale=_rounded(config.integer("hidden_size") ** 0.5),
        logits_soft_cap=config.positive("logits_soft_cap"),
    )


def _rg_lru(config: ConfigFields) -> RgLruSpec:
    width, heads = config.integer("lru_width", config.integer("hidden_size")), config.num_heads
    if heads < 1 or width % heads:
        raise UnusableModel(f"lru_width is {width}, which {heads} heads cannot share evenly")
    return RgLruSpec(
        num_heads=heads,
        head_dim=width // heads,
        kernel=config.integer("conv1d_width"),
        activation=config.activation("hidden_activation"),
    )


def _kinds(config: ConfigFields) -> list[str]:
    """Return the kind of each layer: `block_types` has some, which are repeated."""
    kinds = config.get("block_types")
    if not isinstance(kinds, list | tuple) or not kinds:
        raise UnusableModel(f"block_types is {kinds!r:.80}; it must be a list of kinds of layers")
    if others := [kind for kind in kinds if kind not in (RECURRENT, ATTENTION)]:
        raise UnusableModel(f"block_types has {others[0]!r:.80}, which is not supported")
    return [*islice(cycle(kinds), config.num_layers)]


def _rounded(number: float) -> float:
    """Return the number as bfloat16 stores it, as which the class keeps the factor of the
    embeddings whatever the dtype of the weights is."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    even = bits + 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", even & 0xFFFF0000))
    return float(rounded)


LAYER = "model.layers.{i}."
MIXER = LAYER + "temporal_block."
MLP = LAYER + "mlp_block."
NAMES = {
    "norm": "model.final_norm",
    "attention_norm": LAYER + "temporal_pre_norm",
    "q": MIXER + "q_proj",
    "k": MIXER + "k_proj",
    "v": MIXER + "v_proj",
    "output": MIXER + "o_proj",
    "lru_x": MIXER + "linear_x",
    "lru_gate": MIXER + "linear_y",
    "lru_conv": MIXER + "conv_1d",
    "lru_input_gate": MIXER + "rg_lru.input_gate",
    "lru_decay_gate": MIXER + "rg_lru.recurrent_gate",
    "lru_decay": MIXER + "rg_lru.recurrent_param",
    "lru_output": MIXER + "linear_out",
    "mlp_norm": LAYER + "channel_pre_norm",
    "gate": MLP + "gate_proj",
    "up": MLP + "up_proj",
    "down": MLP + "down_proj",
}


def recurrent_gemma_names(spec: ModelSpec) -> TensorNames:
    endings = dict.fromkeys(LRU_GATES, ("_weight", "_bias")) | {"lru_decay": ("", "")}
    return names_of(NAMES, endings=endings, transposed=frozenset(LRU_GATES))


FAMILIES = (
    ModelFamily(
        architecture="RecurrentGemmaForCausalLM",
        model_type="recurrent_gemma",
        defaults={
            key: value
            for key, value in DEFAULTS.items()
            if key not in ("hidden_act", "max_position_embeddings")
        }
        | {
            "vocab_size": 256000,
            "hidden_size": 2560,
            "intermediate_size": 7680,
            "num_hidden_layers": 26,
            "num_attention_heads": 10,
            "lru_width": None,
            "attention_window_size": 2048,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "block_types": (RECURRENT, RECURRENT, ATTENTION),
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        read=read_recurrent_gemma,
        names=recurrent_gemma_names,
        typical={"num_key_value_heads": 1},
        # Published configs have this key, which no version of the class reads.
        only={"embeddings_scale_by_sqrt_dim": (None, True)},
    ),
)
