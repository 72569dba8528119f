"""Columns of logprobs: computed on the device, copied to the host, and sent as a message.

Columns that the host computes are arrays; the others are tensors on the device. Their copies to the
host are queued without waiting, and only `to_message` reads them.

Legend as in protocol.worker.steps.Logprobs, which has the same fields: N tokens, K most likely
tokens, A requested tokens, D of the N tokens with logprobs under both distributions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from protocol.wire.arrays import Float32, Int32
from protocol.worker.steps import Logprobs

Ints = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """The columns of a Logprobs message, and `possible`."""

    #: [N] index into the tokens, or into the rows for prompt logprobs.
    rows: Ints
    #: [N] number of most likely tokens that were requested.
    counts: Ints
    #: [N] number of the K most likely tokens that are not banned.
    possible: Tensor
    #: [N] token id.
    ids: Tensor
    #: [N] logprob of `ids`.
    logprobs: Tensor
    #: [N] rank of `ids`.
    ranks: Tensor
    #: [N, K] the most likely tokens.
    top_ids: Tensor
    #: [N, K] logprobs of `top_ids`.
    top_logprobs: Tensor
    #: [N] number of tokens named by the token's request; None: no request named tokens.
    asked_counts: Ints | None = None
    #: [N, A] logprobs of the named tokens.
    asked: Tensor | None = None
    #: [D] which of the N tokens have logprobs under both distributions.
    drawn_at: Ints | None = None
    #: [D, 1 + K + A] logprobs under the distribution that the token was drawn from.
    drawn: Tensor | None = None

    def map_tensors(self, copy: Callable[[Tensor], Tensor]) -> LogprobColumns:
        """Return a copy in which `copy` is applied to each tensor."""
        moved: dict[str, Any] = {
            name: copy(value)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **moved)

    def at(self, places: Ints) -> LogprobColumns:
        """Return the columns of these tokens, which are renumbered from 0. `places` [T] are
        ascending indexes into the tokens. The tensors must be in host memory and readable."""
        kept = np.flatnonzero(np.isin(self.rows, places))
        if self.drawn_at is None or self.drawn is None:
            drawn_at, drawn = None, None
        else:
            both = np.flatnonzero(np.isin(self.drawn_at, kept))
            drawn_at, drawn = np.searchsorted(kept, self.drawn_at[both]), self.drawn[both]
        return LogprobColumns(
            rows=np.searchsorted(places, self.rows[kept]),
            counts=self.counts[kept],
            possible=self.possible[kept],
            ids=self.ids[kept],
            logprobs=self.logprobs[kept],
            ranks=self.ranks[kept],
            top_ids=self.top_ids[kept],
            top_logprobs=self.top_logprobs[kept],
            asked_counts=None if self.asked_counts is None else self.asked_counts[kept],
            asked=None if self.asked is None else self.asked[kept],
            drawn_at=drawn_at,
            drawn=drawn,
        )

    def to_message(self) -> Logprobs:
        """Return the message. The tensors must be in host memory and readable."""
        return Logprobs(
            rows=int32(self.rows),
            counts=int32(np.minimum(self.counts, self.possible.numpy())),
            ids=int32(self.ids.numpy()),
            logprobs=float32(self.logprobs.numpy()),
            ranks=int32(self.ranks.numpy()),
            top_ids=int32(self.top_ids.numpy()),
            top_logprobs=float32(self.top_logprobs.numpy()),
            asked_counts=None if self.asked_counts is None else int32(self.asked_counts),
            asked=None if self.asked is None else float32(self.asked.numpy()),
            drawn_at=None if self.drawn_at is None else int32(self.drawn_at),
            drawn=None if self.drawn is None else float32(self.drawn.numpy()),
        )


def int32(values: NDArray[np.generic]) -> Int32:
    return Int32(values.astype(np.int32).tobytes(), values.shape)


def float32(values: NDArray[np.generic]) -> Float32:
    return Float32(values.astype(np.float32).tobytes(), values.shape)
