"""The structs that csrc/kernels.cpp receives by address, field by field as in csrc.

The structs refer to tensors only by address and do not keep them alive. The code that fills a
struct must keep the tensors alive while the struct is used.
"""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p

from worker.spec.kernel_sizes import MAX_PARTS, MAX_TERM_PARTS
from worker.spec.model_spec import Activation

ACTIVATION_KINDS: tuple[Activation, ...] = (
    *("silu", "gelu", "gelu_tanh", "clamped_swiglu", "relu2", "xielu"),
)
"""In the order of ActivationKind in activation.h."""


class CHeads(Structure):
    _fields_ = [("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64)]


class CRows(Structure):
    """The rows of a step, as an AttentionBatch (attention/base.py) describes them. A row is one
    request. `row_starts` has num_rows + 1 items: the index of each row's first token, then the
    number of tokens."""

    _fields_ = [
        ("row_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_table", c_void_p),
        ("num_rows", c_int64),
        ("num_decodes", c_int64),
        ("table_width", c_int64),
        ("block_tokens", c_int64),
        ("seen_ends", c_void_p),
    ]


class CIndexedTokens(Structure):
    """The tokens of a step whose scores an indexer computes, as in `Kernels.index_scores`."""

    _fields_ = [
        ("rows", c_void_p),
        ("visible", c_void_p),
        ("block_table", c_void_p),
        ("count", c_int64),
        ("table_width", c_int64),
        ("block_tokens", c_int64),
        ("block_items", c_int64),
        ("heads", c_int64),
        ("dim", c_int64),
        ("width", c_int64),
    ]


class CPart(Structure):
    """Some rows of a packed matrix, all stored in the same format. `format` is a constant of
    worker/spec/kernel_sizes.py."""

    _fields_ = [("data", c_void_p), ("format", c_int64), ("outputs", c_int64)]


class CPacked(Structure):
    """A packed matrix. If `rounds_inputs`, inputs are rounded to eight bits for its quantised
    parts."""

    _fields_ = [
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("rounds_inputs", c_int64),
        ("num_parts", c_int64),
        ("parts", CPart * MAX_PARTS),
    ]


class CScoring(Structure):
    """How attention scores are computed. A soft cap, window or address of sinks that is 0 means
    that there is none."""

    _fields_ = [
        ("scale", c_double),
        ("soft_cap", c_double),
        ("window", c_int64),
        ("sinks", c_void_p),
        ("sees_runs", c_int64),
    ]


class CDeltaSizes(Structure):
    """The dimensions of a gated delta net."""

    _fields_ = [
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("kernel", c_int64),
        ("is_tiled", c_int64),
        ("unit_eps", c_double),
        ("norm_eps", c_double),
        ("beta_scale", c_double),
        ("decays", c_int64),
        ("is_sigmoid", c_int64),
    ]


class CDeltaWeights(Structure):
    """The weights of a gated delta net beside its linears, as in `DeltaWeights`
    (layers/delta_rule.py)."""

    _fields_ = [
        ("conv", c_void_p),
        ("decay", c_void_p),
        ("bias", c_void_p),
        ("norm", c_void_p),
    ]


class CScanWeights(Structure):
    """The weights of the recurrence of a Mamba-1 layer, as in `Mamba1Weights`
    (layers/mamba1_rule.py)."""

    _fields_ = [
        ("decay", c_void_p),
        ("bias", c_void_p),
        ("skip", c_void_p),
    ]


class CScanInputs(Structure):
    """What the recurrence of a Mamba-1 layer reads, as in `ScanInputs` (layers/mamba1_rule.py).
    `gate_stride` is the number of numbers from token to token of the gate."""

    _fields_ = [
        ("x", c_void_p),
        ("step", c_void_p),
        ("b", c_void_p),
        ("c", c_void_p),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
    ]


class CLruWeights(Structure):
    """The weights of the recurrence of an RG-LRU layer, as in `LruWeights`
    (layers/rg_lru_rule.py)."""

    _fields_ = [
        ("decay", c_void_p),
        ("input_bias", c_void_p),
        ("decay_bias", c_void_p),
    ]


class CLruInputs(Structure):
    """What the recurrence of an RG-LRU layer reads, as in `LruInputs` (layers/rg_lru_rule.py).
    `gate_stride` is the number of numbers from token to token of the gate."""

    _fields_ = [
        ("x", c_void_p),
        ("gates", c_void_p),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
    ]


class CMamba2Sizes(Structure):
    """The dimensions of a Mamba-2 layer, where its result is normed, and the smallest and the
    largest dt."""

    _fields_ = [
        ("heads", c_int64),
        ("head_dim", c_int64),
        ("groups", c_int64),
        ("state", c_int64),
        ("kernel", c_int64),
        ("norm_place", c_int64),
        ("eps", c_double),
        ("least_step", c_double),
        ("most_step", c_double),
    ]


class CMamba2Weights(Structure):
    """The weights of a Mamba-2 layer beside its linears, as in `Mamba2Weights`
    (layers/mamba2_rule.py)."""

    _fields_ = [
        ("conv", c_void_p),
        ("conv_bias", c_void_p),
        ("decay", c_void_p),
        ("bias", c_void_p),
        ("skip", c_void_p),
        ("norm", c_void_p),
    ]


class CStates(Structure):
    """The states of a step's rows, as `StepStates` (slots/states.py) describes them. `memory` and
    `checkpoints` are the addresses of the layer's first number in the first state."""

    _fields_ = [
        ("memory", c_void_p),
        ("checkpoints", c_void_p),
        ("memory_stride", c_int64),
        ("checkpoints_stride", c_int64),
        ("num_slots", c_int64),
        ("num_checkpoints", c_int64),
        ("slots", c_void_p),
        ("starts", c_void_p),
        ("firsts", c_void_p),
        ("counts", c_void_p),
        ("kept", c_void_p),
        ("save_rows", c_void_p),
        ("save_counts", c_void_p),
        ("save_ids", c_void_p),
        ("num_rows", c_int64),
        ("num_saves", c_int64),
    ]


class CNorm(Structure):
    """An RMS norm, or a layer norm if `is_layer`. If `weight` is null, the layer lacks this norm.
    If `is_float`, the weight is float32, otherwise it has the model's dtype."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("is_layer", c_int64),
        ("is_float", c_int64),
    ]


class CRope(Structure):
    _fields_ = [
        ("inv_freq", c_void_p),
        ("width", c_int64),
        ("factor", c_double),
        ("axes", c_void_p),
    ]


class CActivation(Structure):
    """The activation of an MLP. `alpha` and `limit` are read only for a clamped SwiGLU, and the
    numbers after them only for an xIELU."""

    _fields_ = [
        ("kind", c_int64),
        ("is_gated", c_int64),
        ("alpha", c_double),
        ("limit", c_double),
        ("positive", c_double),
        ("negative", c_double),
        ("beta", c_double),
        ("eps", c_double),
    ]


class CMlp(Structure):
    _fields_ = [
        ("gate_up", CPacked),
        ("down", CPacked),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
    ]


class CLayer(Structure):
    _fields_ = [
        ("attention_norm", CNorm),
        ("post_attention_norm", CNorm),
        ("mlp_norm", CNorm),
        ("post_mlp_norm", CNorm),
        ("q_norm", CNorm),
        ("k_norm", CNorm),
        ("qkv", CPacked),
        ("output", CPacked),
        ("router", CPacked),
        ("qkv_bias", c_void_p),
        ("output_bias", c_void_p),
        ("router_bias", c_void_p),
        ("mlps", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("scoring", CScoring),
        ("activation", CActivation),
        ("q_norm_width", c_int64),
        ("k_norm_width", c_int64),
        ("norms_rotated", c_int64),
        ("rope", c_int64),
        ("entry", c_int64),
        ("is_parallel", c_int64),
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("renormalize", c_int64),
    ]


class CLowRankPart(Structure):
    """The LoRA update of one module, such as `q_proj`, in a linear that may compute several modules
    (`LowRankPart` in lora/adapter.py). `up` [rank, outputs] has the model's dtype."""

    _fields_ = [
        ("up", c_void_p),
        ("start", c_int64),
        ("rank", c_int64),
        ("first", c_int64),
        ("outputs", c_int64),
        ("scale", c_double),
    ]


class CLowRankTerm(Structure):
    """The LoRA term that one adapter adds to one linear. `rank` is 0 if the adapter does not change
    the linear."""

    _fields_ = [
        ("down", c_void_p),
        ("rank", c_int64),
        ("num_parts", c_int64),
        ("parts", CLowRankPart * MAX_TERM_PARTS),
    ]


class CStepAdapters(Structure):
    """The adapters of a step's tokens."""

    _fields_ = [
        ("terms", c_void_p),
        ("rows", c_void_p),
        ("shrunk", c_void_p),
        ("width", c_int64),
    ]


class CGrowth(Structure):
    """Factors of the queries by their positions: [count] float32, one for each `tokens` positions.
    A count of 0 means that there are none."""

    _fields_ = [("factors", c_void_p), ("count", c_int64), ("tokens", c_int64)]


class CImageRows(Structure):
    _fields_ = [
        ("index", c_void_p),
        ("rows", c_void_p),
        ("added", c_void_p),
        ("count", c_int64),
        ("num_added", c_int64),
    ]


class CForward(Structure):
    _fields_ = [
        ("layers", c_void_p),
        ("ropes", c_void_p),
        ("num_layers", c_int64),
        ("num_ropes", c_int64),
        ("tokens", c_int64),
        ("hidden", c_int64),
        ("heads", CHeads),
        ("rows", CRows),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("embedding", c_void_p),
        ("packed_embedding", c_void_p),
        ("position_embedding", c_void_p),
        ("x", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("attended", c_void_p),
        ("gate_up", c_void_p),
        ("active", c_void_p),
        ("delta", c_void_p),
        ("scores", c_void_p),
        ("gathered", c_void_p),
        ("parts", c_void_p),
        ("eps", c_double),
        ("embedding_scale", c_double),
        ("residual_scale", c_double),
        ("stored_as", c_int64),
        ("growth", CGrowth),
        ("adapters", CStepAdapters),
        ("images", CImageRows),
        ("rope_positions", c_void_p),
        ("rope_stride", c_int64),
    ]


class CHead(Structure):
    _fields_ = [
        ("norm", CNorm),
        ("weight", CPacked),
        ("eps", c_double),
        ("scale", c_double),
        ("soft_cap", c_double),
    ]


SAMPLER_FIELDS = {
    "token_ids": "token_ids",
    "lens": "len",
    "prompt_lens": "prompt_len",
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "top_k": "top_k",
    "seeds": "seed",
    "repetition": "repetition_penalty",
    "frequency": "frequency_penalty",
    "presence": "presence_penalty",
    "num_bias": "num_bias",
    "bias_ids": "bias_ids",
    "bias_values": "bias_values",
    "num_stops": "num_stop_ids",
    "stop_ids": "stop_ids",
    "min_lens": "min_len",
}
"""Each address of CSampler, and the slot field (worker/slots/fields.py) at it."""


class CSampler(Structure):
    """The slot fields that choosing a token reads, and the widths of some."""

    _fields_ = [
        *((name, c_void_p) for name in SAMPLER_FIELDS),
        ("max_tokens", c_int64),
        ("max_bias", c_int64),
        ("max_stops", c_int64),
    ]


class CDecode(Structure):
    _fields_ = [
        ("forward", CForward),
        ("head", CHead),
        ("slots", c_void_p),
        ("starts", c_void_p),
        ("token_ids", c_void_p),
        ("lens", c_void_p),
        ("block_table", c_void_p),
        ("max_tokens", c_int64),
        ("max_blocks", c_int64),
        ("num_entries", c_int64),
        ("vocab", c_int64),
        ("logits", c_void_p),
        ("tokens", c_void_p),
        ("finite", c_void_p),
        ("sampler", CSampler),
        ("rope_shifts", c_void_p),
    ]
