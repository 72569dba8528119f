"""The parts that all recurrent token mixers use: how a step changes the states of its rows, and
the convolution over the latest tokens.

Legend: T tokens of the step, R rows, N tokens of each row, C width of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from worker.slots.states import Ints, StepStates

SpanRule = Callable[[Tensor, Tensor], object]
"""Computes tokens [R, N], indexes in the step, and changes the states of their rows [R, items] in
place. The tokens of a row follow each other."""


def advance(states: StepStates, offset: int, items: int, compute: SpanRule) -> None:
    """Compute all tokens of a step with `compute`, change the states of its rows in their slots,
    and save those that the step saves.

    Rows of one token are computed together. The tokens of any other row are cut into spans where a
    state is saved. Drafts change a copy of the state.

    offset   index of the layer's first number in a state, of which it has `items`
    """
    part = slice(offset, offset + items)
    memory, checkpoints = states.memory[:, part], states.checkpoints[:, part]
    single = (states.counts == 1) & (states.kept == 1)
    single[states.save_rows[states.save_counts == 0]] = False  # saved before their token, too
    if single.any():
        slots, firsts = (_on(memory, each[single]) for each in (states.slots, states.firsts))
        held = memory.index_select(0, slots)
        compute(firsts[:, None], held)
        memory.index_copy_(0, slots, held)
        for at in np.flatnonzero(single[states.save_rows]):
            slot = int(states.slots[states.save_rows[at]])
            checkpoints[int(states.save_ids[at])] = memory[slot]
    for row in np.flatnonzero(~single).tolist():
        held = memory[int(states.slots[row])]
        first, kept = int(states.firsts[row]), int(states.kept[row])
        end, done = first + int(states.counts[row]), 0
        for count, checkpoint in [*states.saves(row), (kept, 0)]:
            if count > kept:
                continue  # saved once the drafts before it are accepted
            if done < count:
                compute(_span(memory, first + done, first + count), held[None])
                done = count
            if checkpoint:
                checkpoints[checkpoint] = held
        if first + kept < end:
            compute(_span(memory, first + kept, end), held.clone()[None])


def convolved(x: Tensor, tail: Tensor, taps: Tensor) -> Tensor:
    """Return the convolution [R, N, C] of x [R, N, C] with the tokens before it, and move `tail`
    on, which are the latest inputs.

    tail   [R, kernel - 1, C], oldest token first
    taps   [kernel, C], oldest token first
    """
    length = x.shape[1]
    window = torch.cat([tail, x], dim=1)
    tail.copy_(window[:, length:])
    terms = (window[:, i : i + length] * tap for i, tap in enumerate(taps))
    return sum(terms, start=torch.zeros_like(x))


def _span(like: Tensor, first: int, end: int) -> Tensor:
    return torch.arange(first, end, device=like.device)[None]


def _on(like: Tensor, values: Ints) -> Tensor:
    return torch.from_numpy(values).to(like.device)
