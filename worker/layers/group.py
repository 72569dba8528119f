"""A tensor parallel group as one of its ranks sees it: sums and gathers over all ranks.

Every rank computes every step, and samples from logits that all ranks have. So all ranks must get
the same bits from each operation, or their answers would diverge. On CPUs (gloo) the parts of a sum
are gathered and then added in the order of the ranks. So its bits also do not depend on the other
rows of a step, as those of gloo's own sums do. On GPUs it is NCCL's sum, which is computed once and
copied to all ranks.

If a rank ends, the operations of the others fail (`PeerLost`) or never return. The engine then ends
the other ranks (engine_core/workers/link.py).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """The group of a rank. Each operation is called by all ranks in the same order, with tensors of
    the same shape, and gives all of them the same bits."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        ...

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of `part` over all ranks, in its dtype. `part` may be overwritten."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Return the tensors of all ranks, [size, *part.shape]."""
        ...
