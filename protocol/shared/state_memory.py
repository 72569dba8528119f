"""Divides memory among recurrent states: how many slots there are by default, and how many
checkpoints. If a model has no attention, they also limit the number of blocks. The worker and the
simulator use the same rules."""

from __future__ import annotations

CHECKPOINTS_PER_SLOT = 4
STATE_SHARE = 8
"""At most 1/STATE_SHARE of the free memory is for checkpoints, and as much for the states of slots,
unless the user has set the number of slots. So if memory is scarce, there is about one checkpoint
for each slot."""
MAX_EMPTY_BLOCKS = 1 << 18
"""Most blocks of a model without attention by default, unless one request needs more. Their memory
does not count, but the engine keeps a record of each."""


def default_slots(usual: int, state_bytes: int, free_bytes: int) -> int:
    """Return the number of slots of a model if the user has not set it: `usual`, or fewer if their
    states would take too much memory.

    state_bytes   bytes of one state; 0: the model has none
    free_bytes    memory that the weights leave
    """
    if not state_bytes:
        return usual
    return min(usual, max(free_bytes // STATE_SHARE // state_bytes, 1))


def num_checkpoints(state_bytes: int, max_slots: int, free_bytes: int) -> int:
    """Return the number of checkpoints of states.

    state_bytes   bytes of one state; 0: the model has none
    free_bytes    memory that the weights, the slots and a step leave
    """
    if not state_bytes:
        return 0
    return min(CHECKPOINTS_PER_SLOT * max_slots, max(free_bytes, 0) // STATE_SHARE // state_bytes)


def num_empty_blocks(num_states: int, longest_blocks: int) -> int:
    """Return the number of blocks of a model without attention, including the null block: those of
    the longest text before each state, because a prefix is found only as far as a state follows it.
    MAX_EMPTY_BLOCKS limits it.

    num_states       number of slots and checkpoints
    longest_blocks   blocks of the longest text
    """
    return 1 + max(min(num_states * longest_blocks, MAX_EMPTY_BLOCKS), longest_blocks)
