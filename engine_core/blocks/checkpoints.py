"""Pool of checkpoints: copies of the recurrent state of a request after some of its blocks.

A model with recurrent layers keeps a state of fixed size for each request, besides its K/V. A
cached prefix of such a model can be reused only if the state after its last block is known, too. So
the worker copies the state at some block boundaries to checkpoints. The engine owns the ids of the
checkpoints, the worker their memory.

Each id is in one of three places:

- free;
- held: by requests, of which a step or a fetch in flight may still write it, or by leases, whose
  readers may still read it (kv/leases.py). A held checkpoint may be cached as well;
- cached, and not held: found by the content hash of the block that the state follows. The hash
  covers all tokens before it, the namespace and the adapter (hash.py).

A cached checkpoint is usable only with the blocks before it. So it leaves the cache when the block
with its hash leaves the prefix cache. Blocks leave it from the end of a sequence to its beginning,
so no checkpoint usually remains whose earlier blocks are gone. If one does, it is evicted in its
turn.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class CheckpointPool:
    """The checkpoints 1 to `total`. Each operation takes constant time, except `num_covered`, and
    except those that pass over cached checkpoints that are held.

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
        #: The values of `_cached`.
        self._cached_ids: set[int] = set()
        #: Held checkpoint -> number of requests and leases that hold it.
        self._holders: Counter[int] = Counter()

    @property
    def num_held(self) -> int:
        return len(self._holders)

    @property
    def num_cached(self) -> int:
        """The number of checkpoints that are cached and not held."""
        return self.total - len(self._free) - len(self._holders)

    @property
    def free(self) -> list[int]:
        return list(self._free)

    @property
    def holders(self) -> Counter[int]:
        """A copy of the mapping from checkpoint to number of holders, for checks."""
        return Counter(self._holders)

    @property
    def num_allocatable(self) -> int:
        """The number of checkpoints that are not held."""
        return self.total - len(self._holders)

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
        """Return a checkpoint with one holder: a free one, or else the cached one that was used
        longest ago. Return None if all are held.

        A cached one is not evicted if `max_held` or more are held already.
        """
        if self._free:
            number = self._free.pop()
        else:
            if not self.num_allocatable or self.num_held >= max_held:
                return None
            content = next(each for each, held in self._cached.items() if held not in self._holders)
            number = self._cached.pop(content)
            self._cached_ids.remove(number)
            self.num_evicted["checkpoints"] += 1
        self._holders[number] = 1
        return number

    def share(self, checkpoint: int) -> None:
        """Add one holder to a checkpoint that is held or cached."""
        self._holders[checkpoint] += 1

    def publish(self, content: bytes, checkpoint: int) -> None:
        """Cache a checkpoint under this hash, and remove one of its holders. If the hash is cached
        already, that checkpoint stays, because both contain the same state."""
        if content in self._cached:
            self._cached.move_to_end(content)
        else:
            self._cached[content] = checkpoint
            self._cached_ids.add(checkpoint)
        self.release(checkpoint)

    def release(self, checkpoint: int) -> None:
        """Remove one holder from a checkpoint. It is free if it was the last one, and the
        checkpoint is not cached."""
        assert self._holders[checkpoint] > 0, (
            f"checkpoint {checkpoint} was released more often than it was held"
        )
        self._holders[checkpoint] -= 1
        if not self._holders[checkpoint]:
            del self._holders[checkpoint]
            if checkpoint not in self._cached_ids:
                self._free.append(checkpoint)

    def remove(self, content: bytes) -> None:
        """Remove the checkpoint of this hash from the cache, if there is one. It is free then if
        nothing holds it."""
        checkpoint = self._cached.pop(content, None)
        if checkpoint is None:
            return
        self._cached_ids.remove(checkpoint)
        self.num_evicted["blocks"] += 1
        if checkpoint not in self._holders:
            self._free.append(checkpoint)
