"""Which layers of a model each block of a K/V cache stores. Needs no torch.

Usually a block stores all layers. If only some layers have a window, each column of a block table
has several blocks, its entries (KVGroups in protocol/engine/kv_window.py), which store different
layers. All blocks have the same size, so that any of them can be any entry.

If no layer has attention, blocks store no keys and values. The engine counts them all the same: a
prefix of a prompt is found by its blocks, and by a checkpoint of the recurrent state after them. So
a block has EMPTY_TOKEN_BYTES for each token, which are zero, and code that copies or stores blocks
needs no other case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from worker.errors import UnusableModel
from worker.spec.facts import KVHeads, ModelFacts
from worker.spec.model_spec import ModelSpec

EMPTY_TOKEN_BYTES = 1
"""Bytes of a token in the blocks of a model without attention."""


class LayerPlace(NamedTuple):
    """The place of a layer's keys and values.

    entry   which block of a column stores the layer, counted from 0
    row     index of the layer among the layers of that block
    """

    entry: int
    row: int


def layer_places(windows: Sequence[int | None], heads: Sequence[KVHeads]) -> list[LayerPlace]:
    """Return the place of each layer of a model, some of whose layers have a window.

    windows   the window of each layer; None if the layer sees all tokens
    heads     the heads of each layer

    The layers without a window are stored in the first block of a column. The layers with a window
    follow in order. Each of their blocks stores at most as many numbers as the first one, or one
    layer.
    """
    room = sum(each.width for each, window in zip(heads, windows, strict=True) if window is None)
    places, num_full, entry, row, used = [], 0, 1, 0, 0
    for window, each in zip(windows, heads, strict=True):
        if window is None:
            places.append(LayerPlace(0, num_full))
            num_full += 1
            continue
        if row and used + each.width > room:
            entry, row, used = entry + 1, 0, 0
        places.append(LayerPlace(entry, row))
        row, used = row + 1, used + each.width
    return places


def are_empty(models: Sequence[ModelFacts]) -> bool:
    """Return whether blocks store no keys and values, because no layer has attention.

    models   the model, and its draft model if there is one
    """
    return not any(model.num_kv_layers for model in models)


@dataclass(frozen=True, slots=True)
class BlockLayers:
    """The layers with keys and values of their own, and the place of each of them."""

    heads: tuple[KVHeads, ...]
    places: tuple[LayerPlace, ...]

    @classmethod
    def of(cls, spec: ModelFacts, *, by_window: bool = False) -> BlockLayers:
        """Return the layers of a model.

        by_window   whether layers with and without a window are in different blocks
        """
        heads = spec.layer_heads
        if by_window:
            return cls(heads, tuple(layer_places(spec.layer_windows, heads)))
        return cls(heads, tuple(LayerPlace(0, row) for row in range(len(heads))))

    @property
    def num_entries(self) -> int:
        """Return the number of blocks in a column of a block table."""
        return 1 + max((place.entry for place in self.places), default=0)

    @property
    def num_rows(self) -> int:
        """Return the most layers that a block stores."""
        return 1 + max(place.row for place in self.places)

    @property
    def is_empty(self) -> bool:
        """Return whether blocks store no keys and values, because no layer has attention."""
        return not self.heads

    @property
    def is_uniform(self) -> bool:
        """Return whether all layers have the same heads."""
        return len(set(self.heads)) == 1

    @property
    def width(self) -> int:
        """Return the most numbers that a block stores for a token's keys; its values have as
        many."""
        return self._largest(lambda heads: heads.width)

    def token_bytes(self, head_bytes: Callable[[int], int]) -> int:
        """Return the size in bytes of a token's keys and values in one block.

        head_bytes   returns the size in bytes of a stored head from its head dim
        """
        if self.is_empty:
            return EMPTY_TOKEN_BYTES
        return self._largest(lambda heads: heads.num_stored * head_bytes(heads.dim))

    def _largest(self, size: Callable[[KVHeads], int]) -> int:
        """Return the size of the entry whose layers are the largest together."""
        totals = [0] * self.num_entries
        for heads, place in zip(self.heads, self.places, strict=True):
            totals[place.entry] += size(heads)
        return max(totals)


def check_chunks(spec: ModelSpec, block_tokens: int) -> None:
    """Raise UnusableModel if a block could have tokens of two chunks (`AttentionSpec.chunk`)."""
    for chunk in {each.chunk for each in spec.attentions if each.chunk is not None}:
        if chunk % block_tokens:
            raise UnusableModel(
                f"blocks of {block_tokens} tokens do not divide the attention_chunk_size {chunk}",
                remedy="serve with a smaller --block-tokens",
            )
