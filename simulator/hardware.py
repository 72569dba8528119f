"""The tables of GPUs and models, and what follows from them: sizes, and room for the K/V cache and
for recurrent states."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from protocol.config.worker import MAX_SLOTS
from protocol.shared.state_memory import default_slots, num_checkpoints, num_empty_blocks
from simulator.config_names import with_usual_names

GIB = 1 << 30
RESERVED_BYTES = 2 * GIB
"""Memory of a GPU for the largest step and for libraries."""
DTYPE_BYTES = 2
STATE_DTYPE_BYTES = 4
"""Bytes of a number of a recurrent state."""
ATTENTION = ("attention", "full_attention", "sliding_attention", "indexed_attention")
"""The layers in `layer_types` that have attention. All others are recurrent."""

R = TypeVar("R")

Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Size = Annotated[int, Meta(ge=1)]


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the table of GPUs, from the vendor's data sheet.

    The shares are those of a good server today: three quarters of the rate of a copy, which is nine
    tenths of the data sheet's, and half of the data sheet's arithmetic. Measured step times
    (`steps`) replace all of them.
    """

    #: Dense bfloat16 operations per second.
    flops: Positive
    #: Bytes per second of the GPU's memory.
    bandwidth: Positive
    memory_gib: Positive
    #: Bytes per second to the other GPUs of a replica, in each direction.
    link: Positive
    #: The part of `flops` that a long prompt reaches.
    flops_share: Share = 0.5
    #: The part of `bandwidth` that a decode step reaches.
    bandwidth_share: Share = 0.67
    #: Microseconds of a step that neither reads nor arithmetic explain: launches, sampling, waits.
    step_us: Annotated[float, Meta(ge=0)] = 300.0
    #: Microseconds of an all-reduce of a few bytes.
    link_us: Annotated[float, Meta(ge=0)] = 8.0


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model: the fields of its config.json."""

    hidden_size: Size
    #: 0: there are no MLPs.
    intermediate_size: Annotated[int, Meta(ge=0)]
    num_hidden_layers: Size
    num_attention_heads: Size
    vocab_size: Size
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: Size = 1 << 17
    tie_word_embeddings: bool = False
    #: Experts of a layer, under the names of several families; 0: the model is dense.
    num_experts: int = 0
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    #: MLP beside the experts, under the names of several families. A Granite 4 H without experts
    #: has this MLP instead of the other one.
    shared_expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    #: The kind of each layer; None: every `full_attention_interval`-th has attention, if the model
    #: has recurrent layers.
    layer_types: list[str] | None = None
    full_attention_interval: Size = 4
    #: Read only of OLMo Hybrid: its attention has no gates, unlike that of other models with gated
    #: delta nets.
    model_type: str = ""
    #: The number of recurrent layers; None: the fields above and below say it.
    num_recurrent: int | None = None
    #: Gated delta nets, as in Qwen3-Next, Qwen3.5 and OLMo Hybrid.
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    #: Mamba-2, as in Granite 4 H.
    mamba_n_heads: int = 0
    mamba_n_groups: int = 1
    mamba_d_state: int = 0
    mamba_d_conv: int = 0
    mamba_expand: int = 2
    #: Mamba-1, as in Jamba. A width of 0 is `mamba_expand` times the hidden size.
    mamba_dt_rank: int | str = 0
    mamba_width: int = 0
    #: A layer has attention if its index is the offset plus a multiple of the period. With a period
    #: of 0, `layer_types` says which layers have it.
    attn_layer_period: int = 0
    attn_layer_offset: int = 0
    #: The same for layers with experts.
    expert_layer_period: Size = 1
    expert_layer_offset: int = 0
    #: Width of Mamba-2 beside the attention of every layer, as in Falcon-H1.
    mamba_d_ssm: int | None = None
    #: Short convolutions, as in LFM2.
    conv_L_cache: int = 0
    #: RG-LRU, as in RecurrentGemma.
    lru_width: int = 0
    conv1d_width: int = 4
    #: Matrices of an MLP: two without a gate.
    mlp_matrices: int = 3
    #: Latent attention, as in DeepSeek V2 and V3; 0: layers store keys and values. Without a rank
    #: of the queries, these are made of the hidden states.
    kv_lora_rank: int = 0
    q_lora_rank: int | None = None
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    #: The indexer of latent attention, as in DeepSeek V3.2; 0: there is none.
    index_n_heads: int = 0
    index_head_dim: int = 0

    @property
    def has_both(self) -> bool:
        """Whether each layer has attention and a recurrence beside it."""
        return self.mamba_d_ssm is not None

    @property
    def recurrent_layers(self) -> int:
        if self.num_recurrent is not None:
            return self.num_recurrent
        if self.has_both:
            return self.num_hidden_layers
        if self.layer_types is not None:
            return sum(kind not in ATTENTION for kind in self.layer_types)
        if period := self.attn_layer_period:
            return self.num_hidden_layers - self._layers_with(period, self.attn_layer_offset)
        if not self.linear_num_value_heads:
            return 0
        return self.num_hidden_layers - self.num_hidden_layers // self.full_attention_interval

    def _layers_with(self, period: int, offset: int) -> int:
        """Return the number of layers whose index is `offset` in its `period`."""
        return len(range(offset, self.num_hidden_layers, period))

    @property
    def expert_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        if not self.experts:
            return 0
        return self._layers_with(self.expert_layer_period, self.expert_layer_offset)

    @property
    def attention_layers(self) -> int:
        return self.num_hidden_layers - (0 if self.has_both else self.recurrent_layers)

    @property
    def recurrent_sizes(self) -> tuple[int, int]:
        """Numbers of the state of a recurrent layer, and parameters of its projections."""
        hidden = self.hidden_size
        if heads := self.linear_num_value_heads:
            keys = self.linear_num_key_heads * self.linear_key_head_dim
            values = heads * self.linear_value_head_dim
            convolved = 2 * keys + values
            state = heads * self.linear_key_head_dim * self.linear_value_head_dim
            tail = (self.linear_conv_kernel_dim - 1) * convolved
            if self.model_type == "kimi_linear":  # its gates and decays have ranks
                width = self.linear_key_head_dim
                made = hidden * (convolved + values + heads + 2 * width)
                return state + tail, made + width * (keys + values)
            return state + tail, hidden * (convolved + 2 * values + 2 * heads)
        if heads := self.mamba_n_heads:
            width = self.mamba_d_ssm or self.mamba_expand * hidden
            convolved = width + 2 * self.mamba_n_groups * self.mamba_d_state
            state = width * self.mamba_d_state + (self.mamba_d_conv - 1) * convolved
            return state, hidden * (2 * width + convolved + heads)
        if rank := self.mamba_dt_rank:
            width = self.mamba_width or self.mamba_expand * hidden
            state = self.mamba_d_state
            rank = rank if isinstance(rank, int) else -(-hidden // 16)
            parameters = 3 * hidden * width + width * (2 * rank + 2 * state)
            # The matrix A is as large as that of a state, and float32.
            parameters += width * state * STATE_DTYPE_BYTES // DTYPE_BYTES
            return width * state + (self.mamba_d_conv - 1) * width, parameters
        if width := self.lru_width:
            gates = 2 * width * width // self.num_attention_heads
            return self.conv1d_width * width, 3 * hidden * width + gates
        return (self.conv_L_cache - 1) * hidden, 4 * hidden * hidden

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of a request; 0: the model has no recurrent layers."""
        if not self.recurrent_layers:
            return 0
        return STATE_DTYPE_BYTES * self.recurrent_layers * self.recurrent_sizes[0]

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def experts(self) -> int:
        return self.num_experts or self.num_local_experts

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert, in all layers that have it; 0 for a dense model."""
        width = self.moe_intermediate_size or self.intermediate_size
        return self.mlp_matrices * self.hidden_size * width * self.expert_layers

    @property
    def shared_parameters(self) -> int:
        """Parameters that every token uses: attention, recurrent layers, a dense MLP or the one
        beside experts, and the output matrix."""
        dense = self.shared_expert_intermediate_size or self.shared_intermediate_size
        beside = self.hidden_size * (3 * dense + self.experts) * self.expert_layers
        rest = self.num_hidden_layers - self.expert_layers
        width = self.intermediate_size if self.experts else dense or self.intermediate_size
        mlps = beside + self.hidden_size * self.mlp_matrices * width * rest
        mixers = self._attention_parameters * self.attention_layers
        if self.recurrent_layers:
            mixers += self.recurrent_layers * self.recurrent_sizes[1]
        return mixers + mlps + self.vocab_size * self.hidden_size

    @property
    def _attention_parameters(self) -> int:
        """Parameters of the attention of one layer."""
        heads = self.num_attention_heads
        if rank := self.kv_lora_rank:
            queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
            made = self.q_lora_rank or queries
            of_queries = self.q_lora_rank * queries if self.q_lora_rank else 0
            of_latents = heads * rank * (self.qk_nope_head_dim + self.v_head_dim)
            width = made + rank + self.qk_rope_head_dim + heads * self.v_head_dim
            if index_heads := self.index_n_heads:
                of_queries += made * index_heads * self.index_head_dim
                width += self.index_head_dim + index_heads
            return self.hidden_size * width + of_queries + of_latents
        queries = heads * self.head_size
        # Whether the queries have a gate.
        is_gated = self.linear_num_value_heads > 0 and self.model_type != "olmo_hybrid"
        return self.hidden_size * ((2 + is_gated) * queries + 2 * self.kv_heads * self.head_size)

    @property
    def weight_bytes(self) -> int:
        embeddings = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        experts = self.experts * self.expert_parameters
        return DTYPE_BYTES * (self.shared_parameters + experts + embeddings)

    @property
    def pair_products(self) -> int:
        """Products of a query and a key of all heads, and of the weight and the value, in one
        layer. With an indexer, they are those of a pair that it selects."""
        width = 2 * self.head_size
        if rank := self.kv_lora_rank:
            width = 2 * rank + self.qk_rope_head_dim
        return self.num_attention_heads * width + self.index_n_heads * self.index_head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K/V cache per token."""
        if self.kv_lora_rank:
            stored = self.kv_lora_rank + self.qk_rope_head_dim + self.index_head_dim
            return DTYPE_BYTES * stored * self.attention_layers
        return 2 * DTYPE_BYTES * self.kv_heads * self.head_size * self.attention_layers


GPUS = {
    "A100": Gpu(flops=312e12, bandwidth=2.04e12, memory_gib=80, link=300e9),
    "H100": Gpu(flops=989e12, bandwidth=3.35e12, memory_gib=80, link=450e9),
    "H200": Gpu(flops=989e12, bandwidth=4.8e12, memory_gib=141, link=450e9),
    "B200": Gpu(flops=2250e12, bandwidth=8.0e12, memory_gib=180, link=900e9),
    "L40S": Gpu(flops=362e12, bandwidth=0.864e12, memory_gib=48, link=32e9),
    "L4": Gpu(flops=121e12, bandwidth=0.3e12, memory_gib=24, link=32e9),
}
MODELS = {
    "llama-3.1-8b": ModelShape(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "llama-3.1-70b": ModelShape(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "qwen3-8b": ModelShape(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
    "qwen3-30b-a3b": ModelShape(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
    "qwen3.5-9b": ModelShape(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        vocab_size=248320,
        max_position_embeddings=262144,
    ),
    "qwen3-next-80b-a3b": ModelShape(
        hidden_size=2048,
        intermediate_size=5120,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        vocab_size=151936,
        max_position_embeddings=262144,
    ),
    "smollm2-135m": ModelShape(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}


class HardwareTable(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs and models by name. A TOML file has tables such as [gpus.mine] and [models.mine]."""

    gpus: dict[str, Gpu] = {}
    models: dict[str, ModelShape] = {}

    def gpu(self, name: str) -> Gpu:
        """Return a row. Raises ValueError if there is none of this name."""
        return _row(self.gpus, name, "--hardware")

    def model(self, name: str) -> ModelShape:
        """Return a model of the table, or the one that a config.json describes. Raises ValueError
        if there is none of this name, and OSError if the file cannot be read."""
        if not name.endswith(".json"):
            return _row(self.models, name, "MODEL")
        try:
            fields = msgspec.json.decode(Path(name).read_bytes(), type=dict[str, Any])
            # A model that also takes images has the sizes of its text model in a part of its own.
            fields = with_usual_names(fields.get("text_config", fields))
            return msgspec.convert(fields, ModelShape)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{name}: {error}") from None


def read_table(path: str = "") -> HardwareTable:
    """Return the built-in table, with the rows of a TOML file. Raises OSError, and ValueError if
    the file is not such a table."""
    if not path:
        return HardwareTable(gpus=GPUS, models=MODELS)
    try:
        added = msgspec.convert(tomllib.loads(Path(path).read_text("utf-8")), HardwareTable)
    except (tomllib.TOMLDecodeError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: {error}") from None
    return HardwareTable(gpus=GPUS | added.gpus, models=MODELS | added.models)


def describe_table() -> str:
    """Return the built-in table as text."""
    lines = ["GPU      bfloat16 TFLOP/s  memory TB/s  memory GiB  link GB/s"]
    for name, gpu in GPUS.items():
        lines.append(
            f"{name:8} {gpu.flops / 1e12:16,.0f}  {gpu.bandwidth / 1e12:11.2f}  "
            f"{gpu.memory_gib:10,.0f}  {gpu.link / 1e9:9,.0f}"
        )
    lines += ["", "model               weights GiB  K/V KiB per token  state MiB per request"]
    for name, model in MODELS.items():
        weights, kv = model.weight_bytes / GIB, model.kv_bytes / 1024
        state = f"{model.state_bytes / (1 << 20):.1f}" if model.state_bytes else "-"
        lines.append(f"{name:18}  {weights:11.1f}  {kv:17.0f}  {state:>21}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """What fits beside the weights of one replica. `num_blocks` are of K/V, `num_checkpoints` of
    recurrent states."""

    max_slots: int
    num_checkpoints: int
    num_blocks: int


def plan_memory(
    gpu: Gpu,
    model: ModelShape,
    *,
    tensor_parallel: int,
    gpu_memory: float,
    block_tokens: int,
    max_slots: int = 0,
    max_len: int = 0,
) -> ReplicaMemory:
    """Return what fits beside the weights of one replica, by the rules of the worker.

    max_slots   number of slots; 0: the default, which follows the size of recurrent states
    max_len     most tokens of a request; 0: the model's limit

    Raises ValueError if the weights leave too little room.
    """
    if model.state_bytes and tensor_parallel > 1:
        raise ValueError("the server does not divide models with recurrent layers among GPUs")
    if model.kv_lora_rank and tensor_parallel > 1:
        raise ValueError("the server does not divide models with latent attention among GPUs")
    free = tensor_parallel * (gpu.memory_gib * GIB - RESERVED_BYTES) - model.weight_bytes
    room = free - tensor_parallel * (1 - gpu_memory) * gpu.memory_gib * GIB
    state, usual = model.state_bytes, MAX_SLOTS.choose(0, is_gpu=True)
    slots = max_slots or default_slots(usual, state, max(int(free), 0))
    checkpoints = num_checkpoints(state, slots, int(free) - slots * state)
    states = state * (slots + checkpoints)
    if model.kv_bytes:
        blocks = int((room - states) / (model.kv_bytes * block_tokens))
    else:
        longest = -(-(max_len or model.max_position_embeddings) // block_tokens)
        blocks = num_empty_blocks(slots + checkpoints, longest) if room > states else 0
    if blocks < 2:
        need = f"{model.weight_bytes / GIB:.0f} GiB of weights"
        for_kv = "for K/V " if model.kv_bytes else ""
        if states:
            need += f" and {states / GIB:.0f} GiB of recurrent states (--max-slots)"
        raise ValueError(
            f"{need} leave no room {for_kv}in {tensor_parallel} x {gpu.memory_gib:.0f} GiB "
            "(--tensor-parallel)"
        )
    return ReplicaMemory(slots, checkpoints, blocks)


def _row(rows: dict[str, R], name: str, field: str) -> R:
    if name not in rows:
        raise ValueError(f"{field}: {name!r} is not in the table; it has {', '.join(rows)}")
    return rows[name]
