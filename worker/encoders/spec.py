"""The description of an encoder that its forward pass follows. Needs no torch.

An encoder differs from a decoder (../spec/model_spec.py): each token sees the tokens on both sides.
So it has specs of its own. A family (families/) reads its config into an `EncoderSpec`, and the
forward pass (encoder.py) reads nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.engine.encoding import Pooling
from worker.errors import UnusableModel
from worker.spec.model_spec import MAX_DIMENSION, Activation, NormSpec
from worker.spec.rope_config import RopeConfig

OFFSET_BUCKETS = 32
"""Number of buckets for the offset of two tokens. Models with learned biases have one number for
each head and bucket."""
MAX_OFFSET = 128
"""Distance from which on all offsets of a direction share a bucket."""
MAX_GROUP_TOKENS = 1 << 13
"""Most padded tokens of several inputs whose attention is computed in one call (ragged.py). Their
keys and values then fit into caches."""
QUERY_TILE = 512
"""Queries that are computed together if scores have a bias or a window, which bounds the bias."""
HeadActivation = Literal["tanh", "gelu", "gelu_tanh", "silu", "relu", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayerSpec:
    """One layer. `order` says where its norms are: before each block, or after its result was
    added."""

    num_heads: int
    head_dim: int
    intermediate: int
    activation: Activation
    order: Literal["pre", "post"]
    #: None: queries and keys are not rotated.
    rope: RopeConfig | None = None
    #: A token sees the tokens that are at most this many positions away. None: all.
    window: int | None = None
    qkv_bias: bool = True
    output_bias: bool = True
    #: Whether queries and keys have a layer norm over all heads together.
    qk_norm: bool = False
    #: False: attention reads the layer's input without a norm. Only for the order "pre".
    has_attention_norm: bool = True
    #: Whether the MLP is `down(act(gate) * up)`; otherwise it is `down(act(up))`.
    is_gated: bool = False
    up_bias: bool = True
    down_bias: bool = True

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """The head of a model that scores: `out(norm(act(dense(pooled))))`, one number."""

    pooling: Pooling = "cls"
    activation: HeadActivation
    dense_bias: bool = True
    has_norm: bool = False
    out_bias: bool = True
    #: Whether the score is the sigmoid of this number, or the number itself.
    has_sigmoid: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """An encoder: its layers, and everything around them. The constructor raises UnusableModel if
    dimensions are out of bounds."""

    architecture: str
    vocab_size: int
    hidden: int
    #: Most tokens of an input.
    context_tokens: int
    #: Equal layers are one object.
    layers: tuple[EncoderLayerSpec, ...]
    norm: NormSpec
    #: Rows of the table of learned position embeddings; 0: there is no table.
    learned_positions: int = 0
    #: Row of the first position in that table.
    first_position: int = 0
    #: Rows of the table of token types; 0: there is no table.
    token_types: int = 0
    #: Whether the second text of a pair has a type of its own, if there are several.
    types_texts: bool = True
    #: Whether scores are lowered in proportion to the distance of two tokens (ALiBi).
    has_alibi: bool = False
    #: Whether a learned number for each head and bucket of offsets is added to scores.
    has_offset_bias: bool = False
    has_final_norm: bool = False
    #: None: the model gives vectors.
    head: HeadSpec | None = None

    def __post_init__(self) -> None:
        sizes = [self.vocab_size, self.hidden, self.context_tokens, len(self.layers)]
        for layer in set(self.layers):
            sizes += [layer.num_heads, layer.head_dim, layer.intermediate]
            if layer.rope is not None and layer.rope.width > layer.head_dim:
                raise UnusableModel(
                    f"the rotary dimension {layer.rope.width} exceeds the head dimension "
                    f"{layer.head_dim}"
                )
        if not all(0 < size <= MAX_DIMENSION for size in sizes):
            raise UnusableModel(
                f"a dimension of the model is not within 1..{MAX_DIMENSION}: {sizes}"
            )
        if self.learned_positions and (
            self.first_position + self.context_tokens > self.learned_positions
        ):
            raise UnusableModel(
                f"{self.learned_positions} position embeddings do not suffice for "
                f"{self.context_tokens} tokens"
            )

    @property
    def has_score_bias(self) -> bool:
        return self.has_alibi or self.has_offset_bias

    @property
    def num_layers(self) -> int:
        return len(self.layers)
