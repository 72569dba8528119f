"""Plans the memory in which an indexer selects tokens (attention/selection.py). Needs no torch."""

from __future__ import annotations

from worker.spec.architectures import TransformersSpec
from worker.spec.latent import TILE_KEYS
from worker.spec.model_spec import ModelSpec

FLOAT_BYTES = 4
SCORE_BYTES = 24
"""Bytes of a score: the float32 number and a copy, two masks, a count of eight bytes and the
positions of those that are selected."""


def selection_bytes(spec: ModelSpec | TransformersSpec, number_bytes: int) -> int:
    """Return the most bytes of a tile of tokens: the scores of all tokens that they see, with the
    keys and products that torch copies, and the latents of those that are selected. The compiled
    kernels copy no keys and products.

    number_bytes   size of a number of the cache
    """
    if isinstance(spec, TransformersSpec):
        return 0
    largest, pairs = 0, max(TILE_KEYS, spec.context_tokens)
    for latent in {each.latent for each in spec.attentions}:
        if latent is None or latent.indexer is None:
            continue
        indexer = latent.indexer
        of_pair = SCORE_BYTES + FLOAT_BYTES * (indexer.heads + 2 * indexer.dim)
        copied = max(TILE_KEYS, indexer.top) * latent.head_dim * number_bytes
        largest = max(largest, pairs * of_pair + copied)
    return largest
