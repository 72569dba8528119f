"""Sizes of the tiles of Triton's attention, and the number of splits of the keys.

They are functions of the shape of a step, so a captured graph has those of the step that was
captured. tests/unit/test_triton_resources.py compiles the kernels with these sizes and checks that
registers and shared memory suffice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

MAX_SPLITS = 64
SPLIT_SLACK = 1.25
"""Fewer splits are preferred if the launch then takes at most this many times as long."""
NUM_STAGES = 5
"""Triton then keeps two tiles of keys and of values on their way, and their block ids one more."""
TILE_NUMBERS = 1 << 13
"""Numbers of 16 bits in a tile of keys. There are as many in a tile of values. Two tiles of each,
and the queries, fit into the shared memory of all GPUs that are supported."""


@dataclass(frozen=True, slots=True)
class SplitRule:
    """When the keys of a kernel are split."""

    #: Fewest keys of a split. With fewer, merging costs more than it saves.
    min_keys: int
    #: Programs that a processor runs at the same time. Registers and shared memory limit them.
    programs_per_processor: int


DECODE_SPLITS = SplitRule(min_keys=128, programs_per_processor=2)
PREFILL_SPLITS = SplitRule(min_keys=512, programs_per_processor=1)
"""A prefill has more results to merge, so its splits are longer."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """Sizes of the tiles of a kernel, and how many threads and stages compute them."""

    num_queries: int
    num_keys: int
    num_warps: int
    num_stages: int


@lru_cache(maxsize=64)
def num_splits(num_programs: int, num_keys: int, num_processors: int, rule: SplitRule) -> int:
    """Return into how many parts the keys of each row are split.

    num_programs     programs of the launch, if the keys are not split
    num_keys         most keys that a token sees
    num_processors   streaming multiprocessors of the GPU

    A launch takes as many rounds as are needed for all programs. A round takes as long as a split.
    """
    places = rule.programs_per_processor * num_processors
    most = min(MAX_SPLITS, max(1, num_keys // rule.min_keys))
    times = [-(-num_programs * splits // places) / splits for splits in range(1, most + 1)]
    limit = min(times) * SPLIT_SLACK
    return 1 + next(i for i, time in enumerate(times) if time <= limit)


def decode_tile(group: int, head_dim: int, itemsize: int) -> TileShape:
    """Return the tiles of rows of one token: all queries of a group.

    group      query heads of a key/value head
    itemsize   bytes of a number in the cache
    """
    num_queries = max(16, _power_of_two(group))
    if itemsize == 4:
        return _float32_tile(num_queries, head_dim)
    num_warps = 4 if num_queries < 64 else 8
    return TileShape(num_queries, _tile_keys(head_dim), num_warps, NUM_STAGES)


def prefill_tile(group: int, head_dim: int, itemsize: int) -> TileShape:
    """Return the tiles of rows of several tokens: the queries of as many tokens as fit."""
    if itemsize == 4:
        return _float32_tile(max(16, _power_of_two(group)), head_dim)
    most, num_stages = (128, NUM_STAGES) if head_dim <= 128 else (64, NUM_STAGES - 1)
    num_queries = max(most, _power_of_two(group))
    return TileShape(num_queries, _tile_keys(head_dim), 8, num_stages)


def padded_dim(head_dim: int) -> int:
    """Return the dims of a head in a tile, which are a power of two."""
    return _power_of_two(head_dim)


def _float32_tile(num_queries: int, head_dim: int) -> TileShape:
    """Return small tiles: the parts of float32 numbers that are multiplied need more registers."""
    return TileShape(num_queries, 32 if head_dim <= 128 else 16, num_warps=8, num_stages=3)


def _tile_keys(head_dim: int) -> int:
    return min(max(TILE_NUMBERS // padded_dim(head_dim), 16), 128)


def _power_of_two(n: int) -> int:
    """Return the least power of two that is at least n; n >= 1."""
    return 1 << (n - 1).bit_length()
