"""Lists the names and shapes of the tensors that a model has by its config. Needs no torch.

The names are those of Hugging Face checkpoints. The loader, the header check and the memory plan
all use this list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from worker.loading.errors import FETCH_AGAIN, UnusableModel
from worker.models.config import LlamaConfig

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head"
HEAD_WEIGHT = f"{HEAD}.weight"
COMPUTED = "rotary_emb.inv_freq"
"""Suffix of tensors in older checkpoints. They are ignored, because the config implies them."""


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """Matrices with the same input, stacked by rows and multiplied as one matrix."""

    #: Name of each stacked matrix -> its number of rows.
    parts: Mapping[str, int]
    columns: int
    has_bias: bool

    @property
    def rows(self) -> int:
        return sum(self.parts.values())

    @property
    def weights(self) -> dict[str, Shape]:
        """Return name -> shape of each stacked matrix."""
        return {f"{name}.weight": (rows, self.columns) for name, rows in self.parts.items()}

    @property
    def biases(self) -> dict[str, Shape]:
        """Return name -> shape of each bias; empty if there are none."""
        return {f"{name}.bias": (rows,) for name, rows in self.parts.items() if self.has_bias}


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of one layer. The two norms are vectors, given by their names."""

    attention_norm: str
    qkv: FusedMatrix
    output: FusedMatrix
    mlp_norm: str
    gate_up: FusedMatrix
    down: FusedMatrix

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        return self.qkv, self.output, self.gate_up, self.down


def layer_tensors(config: LlamaConfig, index: int) -> LayerTensors:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    hidden, inner = config.hidden, config.intermediate
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return LayerTensors(
        attention_norm=prefix + "input_layernorm.weight",
        qkv=FusedMatrix(
            {attention + "q_proj": q, attention + "k_proj": kv, attention + "v_proj": kv},
            hidden,
            config.attention_bias,
        ),
        output=FusedMatrix({attention + "o_proj": hidden}, q, config.output_bias),
        mlp_norm=prefix + "post_attention_layernorm.weight",
        gate_up=FusedMatrix(
            {mlp + "gate_proj": inner, mlp + "up_proj": inner}, hidden, config.mlp_bias
        ),
        down=FusedMatrix({mlp + "down_proj": hidden}, inner, config.mlp_bias),
    )


def head_matrix(config: LlamaConfig) -> FusedMatrix:
    """Return the output head. A head tied to the embeddings is the embedding tensor."""
    name = EMBEDDING.removesuffix(".weight") if config.tied_embeddings else HEAD
    return FusedMatrix({name: config.vocab_size}, config.hidden, has_bias=False)


def tensor_shapes(config: LlamaConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the name and shape of every tensor of the model."""
    yield EMBEDDING, (config.vocab_size, config.hidden)
    for index in range(config.num_layers):
        layer = layer_tensors(config, index)
        for norm in (layer.attention_norm, layer.mlp_norm):
            yield norm, (config.hidden,)
        for matrix in layer.matrices:
            yield from matrix.weights.items()
            yield from matrix.biases.items()
    yield NORM, (config.hidden,)
    yield from head_matrix(config).weights.items()


def check_tensors(config: LlamaConfig, found: Mapping[str, Shape]) -> None:
    """Raise UnusableModel unless the files hold exactly the model's tensors."""
    # Files may also store a tied head, which is a copy of the embeddings.
    known = {HEAD_WEIGHT} if config.tied_embeddings else set()
    for name, shape in tensor_shapes(config):
        if name not in found:
            raise UnusableModel(f"tensor {name!r} is missing from the files", remedy=FETCH_AGAIN)
        if found[name] != shape:
            raise UnusableModel(f"{name} has shape {found[name]}; the config requires {shape}")
        known.add(name)
    if others := sorted(n for n in found.keys() - known if not n.endswith(COMPUTED)):
        some = ", ".join(others[:3])
        raise UnusableModel(f"the files have {len(others)} unexpected tensors: {some}")
