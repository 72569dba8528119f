"""Samples the next token from processed logits.

Greedy rows (temperature 0) take the argmax, the lowest id among equals, without exponentials or
sorting. Other rows apply these steps in order, each to the tokens that the previous one kept:

    temperature -> top_k -> top_p -> min_p -> draw

    top_k   the k most likely tokens, and all that are as likely as the k-th
    top_p   the fewest most likely tokens that hold top_p of the mass, and all as likely as the last
    min_p   tokens at least min_p times as likely as the most likely one
    draw    inverse of the cumulative distribution in vocabulary order, at u = hash(seed, position)

Each filter is a lower bound on a token's share, which is its probability relative to the most
likely token's. So all filters together are one comparison. A row's token depends only on its own
logits, parameters, seed and position, never on other rows: sums are over integers (exact_probs.py),
and rows are grouped by their own parameters.

Legend: S rows, V vocabulary, N rows of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.batch.batch import Sampled
from worker.device.staging import upload_one
from worker.sampling.exact_probs import exact_exp, relative, rows_at_once, weigh
from worker.sampling.randomness import uniform
from worker.slots.features import DRAW
from worker.slots.table import SlotTable

DIGIT_BITS = 10
SHIFTS = (20, 10, 0)
"""Shifts that select the three digits of a share's float32 bits, ten bits each. Three digits are
enough: a share is at most 1.0, so its bits are below 2**30. Among non-negative floats the order of
the bits is the order of the values."""


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """The sampled tokens [S] int64, and whether each row was finite, [S] bool. A row is not finite
    if a logit is NaN or +inf, or if all tokens are banned; its token is then 0."""

    tokens: Tensor
    finite: Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of the N rows that draw, [N] each, on the device. The `host_` fields are
    copies on the host.

    The values top_k 0, top_p 1 and min_p 0 switch a filter off. u is float64 in [0, 1).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    u: Tensor
    host_top_k: Tensor
    host_top_p: Tensor
    host_min_p: Tensor

    def split(self, size: int) -> Iterator[Draws]:
        """Yield the rows in groups of `size`."""
        columns = (torch.split(getattr(self, name), size) for name in self.__slots__)
        return (Draws(*values) for values in zip(*columns, strict=True))


def sample(logits: Tensor, slots: SlotTable, sampled: Sampled) -> TokenChoice:
    """Sample one token for each row of logits [S, V] float32."""
    if not sampled.features & DRAW:
        return _checked(*logits.max(-1))
    is_greedy = slots.host("temperature")[sampled.host_slots] == 0
    greedy, drawing = _where(is_greedy), _where(~is_greedy)
    if not len(drawing):
        return _checked(*logits.max(-1))
    if not len(greedy):
        return _draw_rows(logits, slots, sampled, drawing)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    finite = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    for rows in (greedy, drawing):
        index = upload_one(rows, logits.device)
        part = logits.index_select(0, index)
        choice = (
            _checked(*part.max(-1)) if rows is greedy else _draw_rows(part, slots, sampled, rows)
        )
        tokens.index_copy_(0, index, choice.tokens)
        finite.index_copy_(0, index, choice.finite)
    return TokenChoice(tokens, finite)


def most_likely(logits: Tensor) -> TokenChoice:
    """Return the most likely token of each row of logits [S, V], the lowest id among equals."""
    return _checked(*logits.max(-1))


def _checked(peaks: Tensor, tokens: Tensor) -> TokenChoice:
    """Return the tokens, with the failed rows marked as not finite. A row's maximum is NaN if any
    logit is NaN, and infinite if a logit is +inf or all tokens are banned."""
    finite = peaks.isfinite()
    return TokenChoice(torch.where(finite, tokens, 0), finite)


def draw(logits: Tensor, peaks: Tensor, draws: Draws) -> Tensor:
    """Draw tokens [N] int64 from logits [N, V] float32, whose maxima are peaks [N]."""
    size = rows_at_once(logits.device)
    if len(logits) > size:
        parts = zip(
            torch.split(logits, size), torch.split(peaks, size), draws.split(size), strict=True
        )
        return torch.cat([draw(*part) for part in parts])
    shares = relative(logits, peaks, draws.temperature)
    weights = weigh(shares, shares.shape[1])
    bound = keep_from(shares, draws)
    if bound is not None:
        weights.masked_fill_(shares < bound[:, None], 0)
    return _invert(weights, draws.u)


def drawn_from(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> Tensor:
    """Return the distribution that `rows` [N] draw from, as the logarithms [N, V] of the shares. A
    token that a filter removed has -inf.

    `logits` [S, V] are processed. `rows` index the step's sampled rows, on the host, and must not
    be greedy.
    """
    draws, device = _draws(slots, sampled, rows, logits.device), logits.device
    part = logits.index_select(0, upload_one(rows, device))
    size = rows_at_once(device)
    pairs = zip(torch.split(part, size), draws.split(size), strict=True)
    return torch.cat([_filtered(*pair) for pair in pairs])


def _filtered(logits: Tensor, draws: Draws) -> Tensor:
    gaps = (logits - logits.amax(-1)[:, None]).div_(draws.temperature[:, None])
    shares = exact_exp(gaps)
    bound = keep_from(shares, draws)
    return gaps if bound is None else gaps.masked_fill_(shares < bound[:, None], float("-inf"))


def keep_from(shares: Tensor, draws: Draws) -> Tensor | None:
    """Return the lower bound [N] that the filters set on shares [N, V], or None if no row has a
    filter. Tokens with smaller shares are removed."""
    by_count = _where((draws.host_top_k > 0) & (draws.host_top_k < shares.shape[1]))
    by_mass = _where(draws.host_top_p < 1)
    if not len(by_count) and not len(by_mass) and not bool((draws.host_min_p > 0).any()):
        return None
    bound = torch.zeros_like(draws.min_p)
    if len(by_count):
        index = upload_one(by_count, shares.device)
        max_k = int(draws.host_top_k[by_count].max())
        bound.index_copy_(
            0, index, kth_largest(_rows(shares, index), draws.top_k[index].long(), max_k)
        )
    if len(by_mass):
        index = upload_one(by_mass, shares.device)
        part = _rows(shares, index)
        if len(by_count):
            part = part.masked_fill(part < bound[index][:, None], 0)
        bound.index_copy_(0, index, heaviest(part, weigh(part, part.shape[1]), draws.top_p[index]))
    return torch.maximum(bound, draws.min_p)


# ---- parts of sampling


def _draw_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> TokenChoice:
    """Return the tokens drawn for `rows` [N], which index the step's sampled rows, on the host.
    logits are [N, V]."""
    peaks = logits.amax(-1)
    return _checked(peaks, draw(logits, peaks, _draws(slots, sampled, rows, logits.device)))


def _draws(slots: SlotTable, sampled: Sampled, rows: Tensor, device: torch.device) -> Draws:
    index = upload_one(rows, device)
    host_at, at, position = sampled.host_slots[rows], sampled.slots[index], sampled.known[index]
    return Draws(
        temperature=slots["temperature"][at],
        top_k=slots["top_k"][at],
        top_p=slots["top_p"][at],
        min_p=slots["min_p"][at],
        u=uniform(slots["seed"][at], position),
        host_top_k=slots.host("top_k")[host_at],
        host_top_p=slots.host("top_p")[host_at],
        host_min_p=slots.host("min_p")[host_at],
    )


def kth_largest(values: Tensor, top_k: Tensor, max_k: int) -> Tensor:
    """Return the top_k[n]-th largest of values [N, V] in each row n; `max_k` is the largest
    top_k."""
    best = values.topk(max_k).values
    return best.gather(1, (top_k - 1)[:, None]).squeeze(1)


def heaviest(keys: Tensor, weights: Tensor, part: Tensor) -> Tensor:
    """Return the largest bound [N] such that the tokens whose keys reach it have at least part [N]
    of the row's weight. The bound is one of the row's keys. Sorting and the search by digits find
    exactly the same bound. A GPU sorts, because sorting is cheap there and the search would wait
    for the device.

    keys      [N, V] float32 in [0, 1]; for a nucleus these are the shares
    weights   [N, V] int64 (exact_probs.py)
    """
    mass = weights.sum(-1)
    target = (mass * part.double()).ceil_().to(torch.int64).clamp_(min=1).minimum(mass)
    return (bound_by_digits if keys.device.type == "cpu" else bound_by_order)(keys, weights, target)


def bound_by_order(shares: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Return the share [N] at which the sum of the weights reaches target [N], if they are added in
    the descending order of the shares.

    shares    [N, V] float32: probability of each token relative to the most likely one
    weights   [N, V] int64: the same as exact integers (exact_probs.py)
    """
    best, order = shares.sort(-1, descending=True)
    totals = weights.gather(1, order).cumsum(-1)
    at = torch.searchsorted(totals, target[:, None]).clamp_(max=shares.shape[1] - 1)
    return best.gather(1, at).squeeze(1)


def bound_by_digits(shares: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Return the same bound as `bound_by_order`, without sorting.

    The bound's bits are found one digit at a time, from the highest. To find a digit, the shares
    that agree with the bound in all higher digits are grouped by this digit, and the weights of
    each group are summed. Rows that are not finite get an arbitrary bound.
    """
    size = 1 << DIGIT_BITS
    keys = shares.contiguous().view(torch.int32)
    digits = (keys >> SHIFTS[0]).clamp_(0, size - 1)
    totals = torch.zeros(len(keys), size, dtype=torch.int64)
    totals.scatter_add_(1, digits.long(), weights)
    bits, target = _digit(totals, target)
    kept = _where((digits == bits.int()[:, None]).view(-1))
    rows = kept // keys.shape[1]
    keys, weights = (each.view(-1).index_select(0, kept) for each in (keys, weights))
    for shift in SHIFTS[1:]:
        digits = (keys >> shift).bitwise_and_(size - 1)
        totals.zero_().view(-1).scatter_add_(0, rows * size + digits, weights)
        chosen, target = _digit(totals, target)
        bits = bits * size + chosen
        kept = _where(digits == chosen.index_select(0, rows))
        rows, keys, weights = (each.index_select(0, kept) for each in (rows, keys, weights))
    return bits.int().view(torch.float32)


def _digit(totals: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's next digit [N], and target [N] minus the weights of all larger digits.

    totals [N, digits] are the summed weights of the shares with each digit. The digit is the
    largest one such that the shares with it or a larger digit reach the target.
    """
    falling = totals.flip(1).cumsum(1)
    at = torch.searchsorted(falling, target[:, None]).clamp_(max=totals.shape[1] - 1)
    before = torch.where(at > 0, falling.gather(1, (at - 1).clamp_(min=0)), 0)
    return totals.shape[1] - 1 - at.squeeze(1), target - before.squeeze(1)


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """Return the first token whose running sum of weights [N, V] exceeds u [N] times the total."""
    totals = weights.cumsum(-1)
    point = (totals[:, -1] * u).to(torch.int64)
    tokens = torch.searchsorted(totals, point[:, None], right=True).squeeze(1)
    return tokens.clamp_(max=weights.shape[1] - 1)


def _rows(matrix: Tensor, index: Tensor) -> Tensor:
    """Return the rows `index` (ascending, distinct) of a matrix. If these are all rows, return the
    matrix itself."""
    return matrix if len(index) == len(matrix) else matrix.index_select(0, index)


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero().squeeze(1)
