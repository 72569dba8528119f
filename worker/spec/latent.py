"""The sizes of latent attention (MLA), which stores one short vector of a token. Needs no torch.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.errors import UnusableModel


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
        return [self.rank, self.rotated, self.plain, self.value_dim, max(self.query_rank, 1)]

    def check(self) -> None:
        """Raise UnusableModel if there cannot be such latents."""
        if min(self.sizes) < 1 or self.query_rank < 0:
            raise UnusableModel(
                f"latent attention has a latent of {self.rank} numbers, heads of {self.plain} + "
                f"{self.rotated}, values of {self.value_dim}, and queries made of {self.query_rank}"
            )
