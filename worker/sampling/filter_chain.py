"""Applies the filters of requests that have an order of filters, before a token is drawn.

Most requests draw by temperature, top_k, top_p and min_p, which sampler.py does with one
comparison. A request that uses another filter, or gives an order, has a chain: its filters
(filters.py) are applied one after the other to its logits, and the draw that follows has neutral
parameters. So whatever draws, or reports the distribution that was drawn from, is the same for all
requests, on every device.

A step without such a request is not examined (features.py). Rows are grouped by the filter at each
place of their orders, so rows with the same order are filtered together.

Legend: S sampled rows, V vocabulary, N rows with a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.engine.sampling import FILTERS, MAX_XTC_THRESHOLD
from worker.batch.batch import Sampled
from worker.device.staging import upload_one
from worker.sampling import filters
from worker.sampling.exact_probs import rows_at_once
from worker.sampling.randomness import uniform
from worker.sampling.slot_lookup import where
from worker.slots import features
from worker.slots.filter_order import PLACE_BITS, PLACES
from worker.slots.table import SlotTable

XTC_DRAW = 1
"""Number of the random number of a position by which XTC applies or not."""


@dataclass(frozen=True, slots=True)
class ChainRows:
    """N rows and their parameters.

    slots, host_slots   [N] the rows' slots, on the device and on the host
    positions           [N] position of the new token, on the device
    """

    table: SlotTable
    slots: Tensor
    host_slots: Tensor
    positions: Tensor

    def __getitem__(self, name: str) -> Tensor:
        """Return the values [N] of a slot field on the device."""
        return self.table[name].index_select(0, self.slots)

    def host(self, name: str) -> Tensor:
        """Return the values [N] of a slot field on the host."""
        return self.table.host(name)[self.host_slots]

    def subset(self, rows: Tensor, index: Tensor) -> ChainRows:
        """Return some of the rows, whose indexes are `rows` on the host and `index` on the
        device."""
        return ChainRows(
            self.table,
            self.slots.index_select(0, index),
            self.host_slots[rows],
            self.positions.index_select(0, index),
        )


def apply_chains(logits: Tensor, slots: SlotTable, sampled: Sampled) -> None:
    """Apply the chains of the step's rows to processed logits [S, V] float32, in place."""
    if not has_chains(sampled):
        return
    has_chain = slots.host("filter_order")[sampled.host_slots] != 0
    size = rows_at_once(logits.device)
    for rows in torch.split(where(has_chain), size):
        index = upload_one(rows, logits.device)
        chain_rows = ChainRows(
            slots,
            sampled.slots.index_select(0, index),
            sampled.host_slots[rows],
            sampled.known.index_select(0, index),
        )
        logits.index_copy_(0, index, filtered(logits.index_select(0, index), chain_rows))


def has_chains(sampled: Sampled) -> bool:
    """Return whether a row of the step may have a chain."""
    return bool(sampled.features & features.FILTERS)


def filtered(logits: Tensor, rows: ChainRows) -> Tensor:
    """Return logits [N, V] after each row's own filters, in each row's own order."""
    orders = rows.host("filter_order")
    for place in range(PLACES):
        numbers = (orders >> (PLACE_BITS * place)) & ((1 << PLACE_BITS) - 1)
        for number in set(numbers.tolist()):
            if number == 0:
                continue
            is_used, apply = STAGES[FILTERS[number - 1]]
            chosen = where((numbers == number) & is_used(rows, logits.shape[1]))
            if len(chosen) == len(logits):
                logits = apply(logits, rows)
            elif len(chosen):
                index = upload_one(chosen, logits.device)
                part = apply(logits.index_select(0, index), rows.subset(chosen, index))
                logits = logits.index_copy(0, index, part)
    return logits


# ---- filters with the parameters in the rows' slots


def _scale(logits: Tensor, rows: ChainRows) -> Tensor:
    temperature, spread = rows["chain_temperature"], rows["dynatemp_range"]
    if bool((rows.host("dynatemp_range") > 0).any()):
        dynamic = filters.dynamic_temperature(
            logits, temperature, spread, rows["dynatemp_exponent"]
        )
        temperature = torch.where(spread > 0, dynamic, temperature)
    return filters.scale(logits, temperature)


def _keep_top_k(logits: Tensor, rows: ChainRows) -> Tensor:
    max_k = int(rows.host("chain_top_k").max())
    return filters.keep_top_k(logits, rows["chain_top_k"].long(), max_k)


def _exclude_top(logits: Tensor, rows: ChainRows) -> Tensor:
    u = uniform(rows["seed"], rows.positions, XTC_DRAW)
    return filters.exclude_top(logits, rows["xtc_threshold"], u <= rows["xtc_probability"])


Filter = Callable[[Tensor, ChainRows], Tensor]
"""Function that returns the filtered logits [N, V] of rows that all use the filter."""
IsUsed = Callable[[ChainRows, int], Tensor]
"""Function of rows and V that returns which rows use a filter, [N] bool on the host."""

STAGES: dict[str, tuple[IsUsed, Filter]] = {
    "temperature": (
        lambda rows, _: (rows.host("chain_temperature") != 1) | (rows.host("dynatemp_range") > 0),
        _scale,
    ),
    "top_n_sigma": (
        lambda rows, _: rows.host("top_n_sigma") > 0,
        lambda logits, rows: filters.keep_top_n_sigma(logits, rows["top_n_sigma"]),
    ),
    "top_k": (
        lambda rows, vocab: (rows.host("chain_top_k") > 0) & (rows.host("chain_top_k") < vocab),
        _keep_top_k,
    ),
    "typ_p": (
        lambda rows, _: rows.host("typical_p") < 1,
        lambda logits, rows: filters.keep_typical(logits, rows["typical_p"]),
    ),
    "top_p": (
        lambda rows, _: rows.host("chain_top_p") < 1,
        lambda logits, rows: filters.keep_top_p(logits, rows["chain_top_p"]),
    ),
    "min_p": (
        lambda rows, _: rows.host("chain_min_p") > 0,
        lambda logits, rows: filters.keep_min_p(logits, rows["chain_min_p"]),
    ),
    "xtc": (
        lambda rows, _: (
            (rows.host("xtc_probability") > 0) & (rows.host("xtc_threshold") <= MAX_XTC_THRESHOLD)
        ),
        _exclude_top,
    ),
}
"""Each filter: which rows use it, and its function."""
