"""Mirostat: limits the surprise of tokens, so that its mean comes near `mirostat_tau` bits.

The surprise of a token is the negative logarithm, to base 2, of its probability. `mu` is the
largest surprise of the next token. Version 2 removes the tokens that surprise more. Version 1
estimates from the most likely tokens how many to keep, so that the surprise would be `mu` in a text
whose words follow Zipf's law. Both keep at least the most likely token. The definitions are
llama.cpp's: after each token, its surprise among the tokens that were left changes `mu` by
mirostat_eta * (mirostat_tau - surprise).

So `mu` depends on all tokens of the answer, and it is in the request's slot. Places after a draft
assume that the draft is right: their `mu` follows from that of the place before and the draft. Once
the drafts are verified, the `mu` after each row's last token goes to the slot, and to the engine,
with which a request continues after a preemption or on another engine.

As elsewhere, sums over the vocabulary are sums of integers (exact_probs.py), so `mu` has the same
bits with drafts as without them, and in any batch. A row that is not finite gets an arbitrary `mu`.

Legend: S sampled places, P rows that sample, V vocabulary, N places with Mirostat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.batch.batch import Ints, Sampled
from worker.device.staging import upload_one
from worker.sampling.exact_probs import exact_exp, scale_bits, weigh
from worker.sampling.filters import FARTHEST, REMOVED
from worker.sampling.slot_lookup import where
from worker.slots.features import MIROSTAT
from worker.slots.fields import MU
from worker.slots.table import SlotTable

ZIPF_TOKENS = 100
"""Most likely tokens from which version 1 estimates the exponent of Zipf's law."""
FLAT = 1e-9
"""A smaller distance of the exponent from 1 counts as none, since the formula divides by it."""


@dataclass(frozen=True, slots=True)
class SurpriseLimits:
    """The places with Mirostat of one step, and the limit at each.

    index   [N] int64 indexes of the places among all S, on the device
    mu      [N] float32 largest surprise of the place's token, in bits
    """

    index: Tensor
    mu: Tensor

    def advance(
        self,
        logits: Tensor,
        tokens: Tensor,
        slots: SlotTable,
        sampled: Sampled,
        ends: tuple[Ints, Tensor] | None = None,
    ) -> Tensor:
        """Store the limits of the next tokens in the rows' slots, and return them, [P] float32. A
        row without Mirostat has 0.

        logits, tokens   [S, V] those from which the tokens [S] were drawn
        ends             [P] index of a place of each row, on the host, and of the place of its last
                         token, on the device; None: each row has one place
        """
        after = next_mu(
            logits.index_select(0, self.index),
            tokens.index_select(0, self.index),
            self.mu,
            slots,
            sampled.slots.index_select(0, self.index),
        )
        of_places = torch.zeros(len(tokens), device=after.device).index_copy_(0, self.index, after)
        of_rows, row_slots = of_places, sampled.host_slots
        if ends is not None:
            of_rows = of_places.index_select(0, ends[1])
            row_slots = row_slots[torch.from_numpy(ends[0])]
        chosen = where(slots.host("mirostat")[row_slots] > 0)
        rows = upload_one(chosen, after.device)
        slot_ids = upload_one(row_slots[chosen], after.device)
        slots[MU].index_copy_(0, slot_ids, of_rows.index_select(0, rows))
        return of_rows


def limit_surprise(logits: Tensor, slots: SlotTable, sampled: Sampled) -> SurpriseLimits | None:
    """Remove the tokens that surprise too much from processed logits [S, V] float32, in place.
    Return the limits, or None if no row of the step uses Mirostat."""
    if not sampled.features & MIROSTAT:
        return None
    versions = slots.host("mirostat")[sampled.host_slots]
    places = where(versions > 0)
    if not len(places):
        return None
    depths = _num_drafts_before(sampled.host_slots[places], sampled.host_known[places])
    mu = torch.empty(len(places), dtype=torch.float32, device=logits.device)
    for depth in range(int(depths.max()) + 1):
        at = where(depths == depth)
        own, index = upload_one(at, logits.device), upload_one(places[at], logits.device)
        slot_ids = sampled.slots.index_select(0, index)
        if depth == 0:
            limit = slots[MU].index_select(0, slot_ids)
        else:
            drafts = slots["token_ids"][slot_ids, sampled.known.index_select(0, index) - 1]
            before = logits.index_select(0, index - 1)
            limit = next_mu(before, drafts.long(), mu.index_select(0, own - 1), slots, slot_ids)
        mu.index_copy_(0, own, limit)
        part = logits.index_select(0, index)
        logits.index_copy_(0, index, _limited(part, limit, versions[places[at]]))
    return SurpriseLimits(upload_one(places, logits.device), mu)


def next_mu(
    logits: Tensor, tokens: Tensor, mu: Tensor, slots: SlotTable, slot_ids: Tensor
) -> Tensor:
    """Return the limits [N] after tokens [N], which were drawn from logits [N, V] with the limits
    mu [N]. `slot_ids` [N] are the rows' slots."""
    gaps = _gaps(logits)
    known = tokens.clamp(0, logits.shape[1] - 1)  # the token of a row that is not finite may be any
    surprise = _log_mass(gaps) - gaps.gather(1, known[:, None]).squeeze(1).double()
    tau, eta = (
        slots[name].index_select(0, slot_ids).double() for name in ("mirostat_tau", "mirostat_eta")
    )
    return (mu.double() + eta * (tau - surprise / math.log(2))).float()


def keep_unsurprising(logits: Tensor, mu: Tensor) -> Tensor:
    """Keep the tokens of logits [N, V] whose surprise is at most mu [N] (version 2)."""
    gaps = _gaps(logits)
    bound = (_log_mass(gaps) - mu.double() * math.log(2)).clamp_max_(0).float()
    return logits.masked_fill(gaps < bound[:, None], REMOVED)


def keep_zipf(logits: Tensor, mu: Tensor) -> Tensor:
    """Keep as many of the most likely tokens of logits [N, V] as give a surprise of mu [N] by
    Zipf's law (version 1). Tokens that are as likely as the last one are kept, too."""
    best = logits.sort(-1, descending=True).values
    exponent = _zipf_exponent(best[:, :ZIPF_TOKENS].double())
    excess, size = exponent - 1, float(logits.shape[1])
    base = torch.where(
        excess.abs() < FLAT, 1 / math.log(size), excess / (1 - size**-excess)
    ) * torch.exp2(mu.double())
    count = torch.nan_to_num(base.pow(1 / exponent), nan=1.0).clamp_(1, size).long()
    return logits.masked_fill(logits < best.gather(1, count[:, None] - 1), REMOVED)


def _zipf_exponent(best: Tensor) -> Tensor:
    """Return the exponent [N] of Zipf's law that fits the most likely tokens' logits [N, K] best,
    which are in descending order. Removed tokens do not count."""
    ranks = torch.arange(1, best.shape[1], dtype=torch.float64, device=best.device)
    steps = (ranks + 1).log() - ranks.log()
    falls = best[:, :-1] - best[:, 1:]
    is_known = falls.isfinite()
    fall = torch.where(is_known, falls * steps, 0.0).cumsum(-1)[:, -1:]
    square = torch.where(is_known, steps.square(), 0.0).cumsum(-1)[:, -1:]
    # cumsum, because the order of its additions does not depend on the number of rows
    return (fall / square).squeeze(1)


def _limited(logits: Tensor, mu: Tensor, versions: Tensor) -> Tensor:
    """Return logits [N, V] limited by mu [N], each row by its version [N], on the host."""
    by_zipf = where(versions == 1)
    if not len(by_zipf):
        return keep_unsurprising(logits, mu)
    if len(by_zipf) == len(logits):
        return keep_zipf(logits, mu)
    index = upload_one(by_zipf, logits.device)
    part = keep_zipf(logits.index_select(0, index), mu.index_select(0, index))
    return keep_unsurprising(logits, mu).index_copy_(0, index, part)


def _num_drafts_before(host_slots: Tensor, host_known: Tensor) -> Tensor:
    """Return the number of drafts [N] before each place in its row. The places of a row, and only
    these, have the same slot; they are neighbours and in order."""
    slots, known = host_slots.numpy(), host_known.numpy()
    begins = np.flatnonzero(np.diff(slots, prepend=-1))
    lens = np.diff(begins, append=len(slots))
    return torch.from_numpy(known - np.repeat(known[begins], lens))


def _gaps(logits: Tensor) -> Tensor:
    """Return logits [N, V] minus each row's largest one, at least FARTHEST."""
    return (logits - logits.amax(-1)[:, None]).clamp_min_(FARTHEST)


def _log_mass(gaps: Tensor) -> Tensor:
    """Return the logarithm [N] float64 of the sum of the shares of gaps [N, V]."""
    mass = weigh(exact_exp(gaps), gaps.shape[1]).sum(-1).double()
    return (mass * 2.0 ** -scale_bits(gaps.shape[1])).log()
