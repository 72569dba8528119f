"""Pool of checkpoints: copies of the recurrent state of a request after some of its blocks.

A model with recurrent layers keeps a state of fixed size for each request, besides its K/V. A
cached prefix of such a model can be reused only if the state after its last block is known, too. So
the worker copies the state at some block boundaries to checkpoints. The engine owns the ids of the
checkpoints, the worker their memory.

Each id is in one of three places:

- free;
- held: by one request, which is being computed. The step that saves it may be in flight;
- cached: found by the content hash of the block that the state follows. The hash covers all tokens
  before it, the namespace and the adapter (hash.py).

A cached checkpoint is usable only with the blocks before it. So it is freed when the block with its
hash leaves the prefix cache. Blocks leave it from the end of a sequence to its beginning, so no
checkpoint usually remains whose earlier blocks are gone. If one does, it is evicted in its turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class CheckpointPool:
    """The checkpoints 1 to `total`. Each operation takes constant time, except `num_covered`.

    num_evicted   how many cached checkpoints were lost so far, by what was lacking: "checkpoints",
                  because a newer state needed the checkpoint, or "blocks", because the K/V block
                  before it was evicted
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_evicted = {"checkpoints": 0, "blocks": 0}
        self._free = list(range(total, 0, -1))
        #: Content hash -> checkpoint, the one used longest ago first.
        self._cached: OrderedDict[bytes, int] = OrderedDict()

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.total - len(self._free) - len(self._cached)

    @property
    def free(self) -> list[int]:
        return list(self._free)

    def __contains__(self, content: bytes) -> bool:
        return content in self._cached

    def items(self) -> dict[bytes, int]:
        """Return a copy of the mapping from hash to checkpoint, for checks."""
        return dict(self._cached)

    def num_covered(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """Return the length of the longest prefix of the first `num_blocks` blocks that ends in a
        cached checkpoint; 0: none does. `hashes` are the content hashes of the blocks."""
        cached = self._cached
        while num_blocks and hashes[num_blocks - 1] not in cached:
            num_blocks -= 1
        return num_blocks

    def use(self, content: bytes) -> int:
        """Return the cached checkpoint of this hash, and count it as just used. Raises KeyError if
        there is none."""
        self._cached.move_to_end(content)
        return self._cached[content]

    def allocate(self, *, max_held: int) -> int | None:
        """Return a checkpoint for a request to hold: a free one, or else the cached one that was
        used longest ago. Return None if all are held.

        A cached one is not evicted if `max_held` or more are held already.
        """
        if self._free:
            return self._free.pop()
        if not self._cached or self.num_held >= max_held:
            return None
        self.num_evicted["checkpoints"] += 1
        return self._cached.popitem(last=False)[1]

    def publish(self, content: bytes, checkpoint: int) -> None:
        """Cache a held checkpoint under this hash. If there is one already, `checkpoint` is freed,
        because both contain the same state."""
        if content in self._cached:
            self._cached.move_to_end(content)
            self._free.append(checkpoint)
        else:
            self._cached[content] = checkpoint

    def release(self, checkpoint: int) -> None:
        """Free a held checkpoint."""
        self._free.append(checkpoint)

    def remove(self, content: bytes) -> None:
        """Free the cached checkpoint of this hash, if any, because its block is evicted."""
        checkpoint = self._cached.pop(content, None)
        if checkpoint is not None:
            self.num_evicted["blocks"] += 1
            self._free.append(checkpoint)
