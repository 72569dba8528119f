"""Divides memory among recurrent states: how many slots there are by default, and how many
checkpoints. The worker and the simulator use the same rules."""

from __future__ import annotations

CHECKPOINTS_PER_SLOT = 4
STATE_SHARE = 8
"""At most 1/STATE_SHARE of the free memory is for checkpoints, and as much for the states of slots,
unless the user has set the number of slots. So if memory is scarce, there is about one checkpoint
for each slot."""


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
