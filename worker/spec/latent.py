"""The sizes of latent attention (MLA), which stores one short vector of a token. Needs no torch.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.errors import UnusableModel

TILE_KEYS = 1 << 14
"""Most pairs of a token and a token that it sees that an indexer computes at once
(attention/selection.py); those of one token may be more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """An indexer selects the tokens that a token sees: those with the `top` largest scores. The
    score of a token is the sum of the positive products of its index key and of the query of each
    head, times a weight of the head:

        score = sum over heads of weight * relu(query . key)

    The layer stores the index key of each token. Source: DeepSeek-V3.2-Exp (arXiv 2512.02556),
    section 2.1.
    """

    #: Index queries of a token.
    heads: int
    #: Numbers of an index query, and of an index key. The first ones are rotated, as many as those
    #: of the attention, but not neighbours together.
    dim: int
    #: Most tokens that a token sees.
    top: int
    #: Of the layer norm of the index keys.
    eps: float = 1e-6

    @property
    def sizes(self) -> list[int]:
        return [self.heads, self.dim, self.top]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Latent attention: a linear makes of each token a latent and a key that is rotated, and both
    are all that is stored. The keys and values of all heads are linear functions of the latent. So
    a head's query, multiplied by the matrix of its keys, is compared with the latent itself; and
    its result is the sum of latents, multiplied by the matrix of its values.

    A stored head is the latent and then the rotated key. A query has the same parts.
    """

    #: Numbers of the latent.
    rank: int
    #: Numbers of a query, and of the key, that are rotated.
    rotated: int
    #: Numbers of a head's query that are not rotated.
    plain: int
    #: Numbers of a head's values.
    value_dim: int
    #: Numbers of the vector of which the queries are made, after a norm. 0: they are made of the
    #: hidden states.
    query_rank: int
    #: Whether neighbouring items are rotated together, not the first of each half and so on.
    turns_neighbours: bool = True
    #: Of the norms of the latent, and of the vector of which the queries are made.
    eps: float = 1e-6
    #: Selects the tokens that a token sees. None: a token sees all tokens before it.
    indexer: IndexerSpec | None = None

    @property
    def head_dim(self) -> int:
        """Return the numbers of a stored head."""
        return self.rank + self.rotated

    @property
    def query_dim(self) -> int:
        """Return the numbers of a head's query before it is multiplied by the matrix of the
        keys."""
        return self.plain + self.rotated

    @property
    def sizes(self) -> list[int]:
        of_indexer = [] if self.indexer is None else self.indexer.sizes
        own = [self.rank, self.rotated, self.plain, self.value_dim, max(self.query_rank, 1)]
        return own + of_indexer

    def check(self) -> None:
        """Raise UnusableModel if there cannot be such latents."""
        if (indexer := self.indexer) is not None:
            if not self.query_rank:
                raise UnusableModel("an indexer needs a vector of which the queries are made")
            if min(indexer.sizes) < 1 or indexer.dim < self.rotated:
                raise UnusableModel(
                    f"an indexer has {indexer.heads} heads of {indexer.dim}, {self.rotated} of "
                    f"which are rotated, and selects {indexer.top} tokens"
                )
        if min(self.sizes) < 1 or self.query_rank < 0:
            raise UnusableModel(
                f"latent attention has a latent of {self.rank} numbers, heads of {self.plain} + "
                f"{self.rotated}, values of {self.value_dim}, and queries made of {self.query_rank}"
            )
