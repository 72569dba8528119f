"""The tables of GPUs and models, and what follows from them: sizes, and room for the K/V cache."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

GIB = 1 << 30
RESERVED_BYTES = 2 * GIB
"""Memory of a GPU for the largest step and for libraries."""
DTYPE_BYTES = 2

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
    intermediate_size: Size
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
        """Parameters of one expert, in all layers; 0 for a dense model."""
        width = self.moe_intermediate_size or self.intermediate_size
        return 3 * self.hidden_size * width * self.num_hidden_layers if self.experts else 0

    @property
    def shared_parameters(self) -> int:
        """Parameters that every token uses: attention, a dense MLP, and the output matrix."""
        queries = self.num_attention_heads * self.head_size
        attention = self.hidden_size * (2 * queries + 2 * self.kv_heads * self.head_size)
        dense = 0 if self.experts else 3 * self.hidden_size * self.intermediate_size
        router = self.hidden_size * self.experts
        layers = (attention + dense + router) * self.num_hidden_layers
        return layers + self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        embeddings = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        experts = self.experts * self.expert_parameters
        return DTYPE_BYTES * (self.shared_parameters + experts + embeddings)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K/V cache per token."""
        return 2 * DTYPE_BYTES * self.kv_heads * self.head_size * self.num_hidden_layers


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
            return msgspec.convert(fields.get("text_config", fields), ModelShape)
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
    lines += ["", "model            weights GiB  K/V KiB per token"]
    for name, model in MODELS.items():
        lines.append(f"{name:16} {model.weight_bytes / GIB:11.1f}  {model.kv_bytes / 1024:17.0f}")
    return "\n".join(lines)


def num_blocks(
    gpu: Gpu, model: ModelShape, *, tensor_parallel: int, gpu_memory: float, block_tokens: int
) -> int:
    """Return how many blocks of K/V fit beside the weights of one replica. Raises ValueError if the
    weights leave too little room."""
    room = tensor_parallel * (gpu_memory * gpu.memory_gib * GIB - RESERVED_BYTES)
    blocks = int((room - model.weight_bytes) / (model.kv_bytes * block_tokens))
    if blocks < 2:
        need = model.weight_bytes / GIB
        raise ValueError(
            f"{need:.0f} GiB of weights leave no room for K/V in {tensor_parallel} x "
            f"{gpu.memory_gib:.0f} GiB (--tensor-parallel)"
        )
    return blocks


def _row(rows: dict[str, R], name: str, field: str) -> R:
    if name not in rows:
        raise ValueError(f"{field}: {name!r} is not in the table; it has {', '.join(rows)}")
    return rows[name]
