"""The description of a model that a forward pass follows. Needs no torch.

A family (families/) reads its config into a `ModelSpec`. The eager decoder (decoder.py) and the
compiled kernels (whole_step.py) read nothing else, so a new family changes neither of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log1p
from typing import Literal, Self

from worker.errors import UnusableModel
from worker.spec.altup_spec import AltUpSpec
from worker.spec.facts import KVHeads
from worker.spec.latent import LatentSpec
from worker.spec.recurrent import RecurrentSpec
from worker.spec.rope_config import QueryGrowth, RopeConfig

MAX_DIMENSION = 1 << 24
MAX_LAYERS = 1 << 12

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu", "xielu"]
"""`relu2` is the square of the positive part."""
AdaptedLinear = Literal["qkv", "output", "gate_up", "down"]
"""The linears of a layer that a LoRA adapter can change. The first two are those of the token
mixer, whatever its kind is."""
LayerOrder = Literal["pre", "post", "both", "parallel", "parallel_one_norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A norm over the last axis. A `layer` norm also subtracts the mean."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float
    #: The norm multiplies by `offset + weight`.
    offset: float = 0.0
    #: Only layer norms have biases.
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer. `num_heads` query heads share `num_kv_heads` key/value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: None: queries and keys are not rotated.
    rope: RopeConfig | None
    #: Factor of the scores, usually `head_dim ** -0.5`.
    scale: float
    #: Number of latest tokens that a token sees, itself included. None: all.
    window: int | None = None
    #: A text is cut into chunks of this many tokens, and a token sees those of its own chunk up to
    #: itself. None: there are no chunks.
    chunk: int | None = None
    #: Whether the tokens of an image see each other, the later ones too.
    sees_whole_runs: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    #: Whether queries and keys have a norm: over each head, over all heads together, or a plain one
    #: over each head, without a weight.
    qk_norm: Literal["none", "head", "projection", "plain"] = "none"
    #: Scores become `soft_cap * tanh(score / soft_cap)`.
    soft_cap: float | None = None
    #: Whether a learned score of each head joins the softmax, without a value of its own.
    sinks: bool = False
    #: Whether the result of each head is multiplied by the sigmoid of a gate, which the projection
    #: of the queries also makes: in the file, the rows of a head are its query and then its gate.
    gated: bool = False
    #: Whether the values are the projected keys, before their norm and their rotation.
    keys_as_values: bool = False
    #: Whether the values of each head have a norm without a weight.
    value_norm: bool = False
    #: Index of the earlier layer whose keys and values this one reads. None: it makes its own.
    kv_of: int | None = None
    #: Factor of the result.
    result_scale: float = 1.0
    #: Whether the norms of queries and keys read them after their rotation.
    norms_rotated: bool = False
    #: Factors of the queries, after their rotation, by their positions. None: there are none.
    growth: QueryGrowth | None = None
    #: The latents, if the layer stores these. There is then one key/value head, with the rotated
    #: key and the latent of a token. None: it stores keys and values.
    latent: LatentSpec | None = None

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def result_width(self) -> int:
        """Return how many numbers the heads return for a token."""
        return self.num_heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def work_width(self) -> int:
        """Return how many intermediate values there are for one token: queries, keys, values, gates
        and results. Latent attention also has copies of the queries and of the results, by head."""
        if (latent := self.latent) is not None:
            made = latent.query_rank + 2 * self.num_heads * latent.query_dim
            if (indexer := latent.indexer) is not None:  # queries, weights and selected positions
                made += indexer.heads * (2 * indexer.dim + 1) + 2 * (indexer.dim + indexer.top)
            return made + 4 * self.q_width + 2 * self.result_width
        return (2 + self.gated) * self.q_width + 2 * self.kv_width

    @property
    def kv_heads(self) -> KVHeads:
        return KVHeads(self.num_kv_heads, self.head_dim, self.latent is not None)

    @property
    def stored_heads(self) -> tuple[KVHeads, ...]:
        """Return the heads that the layer stores for a token: those of its keys and values, and
        the index key if it has an indexer."""
        indexer = None if self.latent is None else self.latent.indexer
        index_keys = () if indexer is None else (KVHeads(1, indexer.dim, is_latent=True),)
        return self.kv_heads, *index_keys


@dataclass(frozen=True, slots=True)
class Xielu:
    """The learned numbers of an xIELU, which is beta * x + positive * x^2 above zero, and
    beta * x + negative * (e^min(x, eps) - 1 - x) below. Source: arXiv 2411.13010."""

    positive: float
    negative: float
    beta: float
    eps: float

    @classmethod
    def of(cls, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Self:
        """Return the numbers that files store as these."""
        return cls(_softplus(alpha_p), beta + _softplus(alpha_n), beta, eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """The MLP of one layer: `down(act(gate) * up)` if it is gated, else `down(act(up))`.

    With `clamped_swiglu` it is `down(gate * sigmoid(alpha * gate) * (up + 1))`, with the gate at
    most `limit` and up within `limit` of zero.
    """

    intermediate: int
    activation: Activation = "silu"
    is_gated: bool = True
    #: Whether the projections of each expert, and the router, have biases.
    bias: bool = False
    #: 1: a plain MLP. More: a router chooses `top_k` experts of this shape for each token.
    num_experts: int = 1
    top_k: int = 1
    #: Weights of the experts: the softmax of the router's scores, the sigmoid of each of them, or
    #: those of a sparse mixer (layers/mlp.py).
    router: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    #: A sparse mixer counts scores as near the largest one if they are within twice this share.
    jitter: float = 0.0
    #: Whether a learned bias of each expert is added to its weight, for the choice only.
    choice_bias: bool = False
    #: The experts form `num_groups` groups of consecutive ones, and are chosen from `top_groups` of
    #: them: those whose largest weights, with the choice biases, have the largest sum.
    num_groups: int = 1
    top_groups: int = 1
    #: How many of the largest weights of a group are added.
    group_weights: int = 2
    #: Whether the weights of the chosen experts are divided by their sum plus `sum_eps`.
    renormalize: bool = True
    sum_eps: float = 0.0
    #: Whether the input of a chosen expert, and not its result, is multiplied by its weight.
    weighs_inputs: bool = False
    #: Factor of the weights of the chosen experts.
    expert_scale: float = 1.0
    #: Width of what the experts read and return: one linear makes it of the hidden states, and
    #: another one makes hidden states of the sum of the results. 0: they read the hidden states.
    latent: int = 0
    #: Used only by `clamped_swiglu`.
    alpha: float = 0.0
    limit: float = 0.0
    #: Used only by `xielu`, which has no gate. None: the layer has tensors of the numbers.
    xielu: Xielu | None = None
    #: Intermediate size of an expert that computes every token beside the chosen ones. 0: there is
    #: none.
    shared: int = 0
    #: Whether the result of that expert is multiplied by the sigmoid of a learned score of the
    #: token.
    scores_shared: bool = True
    #: Whether the router reads a norm of its input, with a weight of its own.
    router_norm: bool = False
    #: Whether the weight of each chosen expert is multiplied by a learned factor of the expert.
    expert_factors: bool = False
    #: Factors of the gate, before the activation, and of the result. Experts have none.
    gate_scale: float = 1.0
    result_scale: float = 1.0
    #: The mean of a token's gates plus `gate_cutoff` standard deviations is subtracted from each of
    #: them, and negative results become zero. None: the gates stay as they are, as in experts.
    gate_cutoff: float | None = None

    def check(self) -> None:
        """Raise UnusableModel if the experts cannot be chosen so."""
        experts, groups, top_groups = self.num_experts, self.num_groups, self.top_groups
        if groups < 1 or experts % groups or not 0 < top_groups <= groups:
            raise UnusableModel(
                f"{top_groups} of {groups} groups of {experts} experts cannot be chosen"
            )
        if groups > 1 and experts // groups < self.group_weights:
            raise UnusableModel(f"groups of one expert are not supported: {groups} groups")
        if self.top_k > experts // groups * top_groups:
            raise UnusableModel(f"{self.top_k} of {experts} experts cannot be chosen")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: two blocks, a token mixer and an MLP, or only one of them. The mixer is attention
    or a recurrence, or both side by side: they read the same norm, and their results are added.
    `order` says where the norms of the blocks are.

    pre                 norm before each block
    post                norm after each block, before its result is added
    both                norms before and after each block
    parallel            both blocks read the layer's input, each through a norm of its own
    parallel_one_norm   both blocks read the layer's input through one norm
    """

    attention: AttentionSpec | None = None
    recurrent: RecurrentSpec | None = None
    mlp: MlpSpec | None = None
    #: Experts beside the MLP. They read the layer's hidden states through a norm of their own, and
    #: each of the two results has a norm before they are added. None: there are none.
    beside: MlpSpec | None = None
    #: Whether the hidden states are multiplied by a learned number at the end of the layer.
    scaled: bool = False
    #: Rank of a linear branch beside the attention, which reads the same norm (layers/laurel.py).
    #: None: there is none.
    laurel: int | None = None
    order: LayerOrder = "pre"

    @property
    def has_mixer(self) -> bool:
        return self.attention is not None or self.recurrent is not None

    @property
    def mlps(self) -> tuple[MlpSpec, ...]:
        """Return the MLP and the experts beside it, if the layer has them."""
        return tuple(mlp for mlp in (self.mlp, self.beside) if mlp is not None)

    @property
    def has_two_mixers(self) -> bool:
        return self.attention is not None and self.recurrent is not None

    @property
    def has_one_block(self) -> bool:
        """Return whether the token mixer or the MLP is missing."""
        return not self.has_mixer or self.mlp is None

    def check(self) -> None:
        """Raise UnusableModel if the layer's blocks are not supported together."""
        if self.has_two_mixers and self.order != "pre":
            raise UnusableModel("a layer has two token mixers, and norms for one")
        if not self.has_mixer and self.mlp is None:
            raise UnusableModel("a layer has neither a token mixer nor an MLP")
        if self.has_one_block and (self.order != "pre" or self.beside is not None):
            raise UnusableModel("a layer with one block has norms or experts for two")
        if self.laurel is not None and (self.attention is None or self.order != "both"):
            raise UnusableModel("a layer has a linear branch, but no attention between two norms")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsSpec:
    """Per-layer inputs: after its MLP, each layer adds what it makes of `width` numbers, which
    belong to the token and the layer.

    The numbers are the sum of a row of a table, [table_rows, layers * width], and of the norm of a
    projection of the token's embedding. The hidden states decide how much each number counts:

        x += norm(project(activation(gate(x)) * inputs))
    """

    width: int
    table_rows: int
    activation: Activation
    #: Factor of a row of the table, and of the projection.
    table_scale: float
    projection_scale: float
    #: Factor of the sum.
    sum_scale: float
    #: Whether tokens without a row in the table read its first one. If not, all tokens have a row.
    others_read_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A causal decoder: its layers, and everything around them. The constructor raises
    UnusableModel if dimensions are out of bounds or contradict each other."""

    architecture: str
    vocab_size: int
    hidden: int
    context_tokens: int
    #: Equal layers are one object.
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tied_embeddings: bool = False
    head_bias: bool = False
    #: Rows of the table of learned position embeddings; 0: there is no table.
    learned_positions: int = 0
    embedding_scale: float = 1.0
    #: Factor of the result that each block adds to its input.
    residual_scale: float = 1.0
    #: Whether the sum of the blocks' results is float32, whatever the dtype of the weights is.
    float_residual: bool = False
    logits_scale: float = 1.0
    #: Logits become `cap * tanh(logit / cap)`.
    logits_soft_cap: float | None = None
    #: None: the layers have no inputs besides the hidden states.
    layer_inputs: LayerInputsSpec | None = None
    #: None: the hidden states of a token are one stream.
    altup: AltUpSpec | None = None

    def __post_init__(self) -> None:
        sizes = [self.vocab_size, self.hidden, self.context_tokens, len(self.layers)]
        if self.layer_inputs is not None:
            sizes += [self.layer_inputs.width, self.layer_inputs.table_rows]
            lacks_rows = self.layer_inputs.table_rows < self.vocab_size
            if lacks_rows and not self.layer_inputs.others_read_first:
                raise UnusableModel("the table of the per-layer inputs lacks rows for some tokens")
        if self.altup is not None:
            self.altup.check()
            if self.layer_inputs is None:
                raise UnusableModel("streams of hidden states without per-layer inputs")
        for layer in set(self.layers):
            attention, recurrent = layer.attention, layer.recurrent
            layer.check()
            if attention is not None:
                _check_attention(attention)
                sizes += [attention.num_heads, attention.num_kv_heads, attention.head_dim]
                sizes += [] if attention.latent is None else attention.latent.sizes
            if recurrent is not None:
                recurrent.check()
                sizes += recurrent.sizes
            if layer.laurel is not None:
                sizes.append(layer.laurel)
            for mlp in layer.mlps:
                mlp.check()
                sizes += [mlp.intermediate, mlp.num_experts, mlp.top_k]
                sizes += [size for size in (mlp.shared, mlp.latent) if size]
        if not all(0 < size <= MAX_DIMENSION for size in sizes):
            raise UnusableModel(
                f"a dimension of the model is not within 1..{MAX_DIMENSION}: {sizes}"
            )
        if not any(layer.has_mixer for layer in self.layers):
            raise UnusableModel("models without attention and recurrent layers are not supported")
        for index, layer in enumerate(self.layers):
            if layer.attention is not None and layer.attention.kv_of is not None:
                self._check_shared(index, layer.attention, layer.attention.kv_of)

    def _check_shared(self, index: int, reader: AttentionSpec, source: int) -> None:
        """Raise UnusableModel unless layer `index` can read the keys and values of `source`."""
        owner = self.layers[source].attention if 0 <= source < index else None
        if owner is None or owner.kv_of is not None:
            raise UnusableModel(f"layer {index} cannot read the keys and values of layer {source}")
        if (owner.kv_heads, owner.window) != (reader.kv_heads, reader.window):
            raise UnusableModel(
                f"layer {index} reads the keys and values of layer {source}, whose heads or window "
                "differ"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def mlps(self) -> tuple[MlpSpec, ...]:
        """Return the MLPs of all layers, and the experts beside them."""
        return tuple(mlp for layer in self.layers for mlp in layer.mlps)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Return the attention of each layer that has one."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def sees_whole_runs(self) -> bool:
        """Return whether a step must compute the tokens of an image as a whole."""
        return any(attention.sees_whole_runs for attention in self.attentions)

    @property
    def recurrents(self) -> tuple[RecurrentSpec, ...]:
        """Return the recurrence of each layer that has one."""
        return tuple(layer.recurrent for layer in self.layers if layer.recurrent is not None)

    @property
    def has_rope_axes(self) -> bool:
        """Return whether the rotary positions of an image have several axes."""
        return any(each.rope is not None and each.rope.axes for each in self.attentions)

    @property
    def kv_owners(self) -> tuple[AttentionSpec, ...]:
        """Return the attention of each layer that has keys and values of its own."""
        return tuple(each for each in self.attentions if each.kv_of is None)

    @property
    def num_kv_layers(self) -> int:
        return len(self.kv_owners)

    @property
    def layer_heads(self) -> tuple[KVHeads, ...]:
        return tuple(heads for each in self.kv_owners for heads in each.stored_heads)

    @property
    def kv_places(self) -> tuple[int | None, ...]:
        """Return, for each layer, the index in `layer_heads` of the keys and values that it reads;
        None for a layer without attention. Index keys have the index after it."""
        places: list[int | None] = []
        num_stored = 0
        for layer in self.layers:
            if layer.attention is None:
                places.append(None)
            elif layer.attention.kv_of is None:
                places.append(num_stored)
                num_stored += len(layer.attention.stored_heads)
            else:
                places.append(places[layer.attention.kv_of])
        return tuple(places)

    @property
    def state_items(self) -> int:
        """Return how many float32 numbers the recurrent state of a request has; 0: no layer has
        one."""
        return sum(each.state_items for each in self.recurrents)

    @property
    def window(self) -> int | None:
        """Return the longest window of all layers, in tokens; None if a layer sees all tokens, or
        if no layer has attention."""
        windows = [window for window in self.layer_windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.layer_windows) else None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Return the window of each of `layer_heads`, in tokens; None if all tokens are seen."""
        return tuple(each.window for each in self.kv_owners for _ in each.stored_heads)

    @property
    def windows(self) -> frozenset[int | None]:
        """Return the distinct windows of the layers, in tokens. They include None if a layer sees
        all tokens."""
        return frozenset(self.layer_windows)


def _softplus(x: float) -> float:
    return max(x, 0.0) + log1p(exp(-abs(x)))


def checked_layers(count: int) -> int:
    """Return `count`, the number of layers. Raises UnusableModel unless it is 1 to MAX_LAYERS."""
    if not 0 < count <= MAX_LAYERS:
        raise UnusableModel(f"the model has {count} layers; 1 to {MAX_LAYERS} are supported")
    return count


def _check_attention(attention: AttentionSpec) -> None:
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    if (latent := attention.latent) is not None:
        latent.check()
        if attention.rope is not None and attention.rope.width != latent.rotated:
            raise UnusableModel(
                f"{attention.rope.width} items are rotated, and a latent has a key of "
                f"{latent.rotated} for that"
            )
    if min(heads, kv_heads, attention.head_dim) < 1:
        raise UnusableModel(f"attention has {heads} heads of {attention.head_dim}")
    if heads % kv_heads:
        raise UnusableModel(f"{heads} heads cannot share {kv_heads} key/value heads evenly")
    if attention.rope is not None and attention.rope.width > attention.head_dim:
        raise UnusableModel(
            f"{attention.rope.width} items of a head of {attention.head_dim} cannot be rotated"
        )
    if attention.window is not None and attention.window < 1:
        raise UnusableModel(f"sliding_window is {attention.window}; it must be above zero")
