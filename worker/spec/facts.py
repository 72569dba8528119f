"""The facts about a model that a worker needs, whoever computes it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KVHeads:
    """The key/value heads of a layer: how many, and the numbers of each. If `is_latent`, no values
    are stored beside the keys: the values are parts of the keys, or there are none."""

    count: int
    dim: int
    is_latent: bool = False

    @property
    def width(self) -> int:
        """Return how many numbers the keys of a token have. Stored values, if there are some, have
        as many."""
        return self.count * self.dim

    @property
    def num_stored(self) -> int:
        """Return how many heads are stored for a token: its keys and its values."""
        return self.count if self.is_latent else 2 * self.count


class ModelFacts(Protocol):
    """Facts about a model that a worker needs, whether our decoder or transformers computes it."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_layers(self) -> int:
        """Return the number of layers with keys and values of their own."""
        ...

    @property
    def layer_heads(self) -> tuple[KVHeads, ...]:
        """Return the heads of each layer with keys and values of its own. Those of its index keys
        follow, if the layer has an indexer."""
        ...

    @property
    def window(self) -> int | None:
        """Return the longest window of all layers, in tokens; None if a layer sees all tokens, or
        if the windows are not known."""
        ...

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Return the window of each of `layer_heads`, in tokens; None if the layer sees all tokens,
        or if its window is not known."""
        ...

    @property
    def state_items(self) -> int:
        """Return how many float32 numbers the recurrent state of a request has; 0: the model has
        none in its slots."""
        ...
