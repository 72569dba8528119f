"""DRY: penalises the tokens that would continue a repetition ("don't repeat yourself").

Let the text of a request, or its last dry_penalty_last_n tokens, end with n tokens that also occur
earlier. Then the token after the earlier occurrence would continue the repetition, and its logit
loses multiplier * base ** (n - allowed_length), if n is at least allowed_length. If there are
several such occurrences, the longest one counts. A sequence breaker ends a repetition: n counts
only tokens after the last breaker of the text, and a breaker of one token is never penalised.

As all penalties, DRY stores no state: it reads the request's own tokens each time. The earlier
occurrences of the last token are found with one comparison. Only these are compared further,
BLOCK tokens at a time, up to the length from which on the penalty is the same.

Legend: N rows, V vocabulary, L tokens of the longest row, B breakers of the row with most of them,
K heads and T tokens of tails of a row's breakers together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.engine.sampling import MAX_BREAKER_TAIL
from worker.batch.batch import Sampled
from worker.sampling.slot_lookup import known_tokens, listed_ids, rows_and_slots, where
from worker.slots import features
from worker.slots.table import SlotTable

BLOCK = 16
"""Tokens that are compared at once."""
LARGEST_LOG = 88.7228391
"""Logarithm of the largest float32. The penalty's exponent is limited so that the power of the base
is not larger."""
SMALLEST_BASE = 1.000001
"""The powers of a base up to this one are taken for 1."""
NO_TOKEN = -1
HEAD_BITS = 32
"""Bits of a token id in `Breakers.heads`."""
KEY_STEP = MAX_BREAKER_TAIL + 1
LARGEST_EXPONENT = 256
"""Longer repetitions have the same penalty, so a step compares no token with more than this many
after the allowed ones."""
ITEMS_AT_ONCE = 1 << 22
"""Items of the largest tensors."""
END = torch.iinfo(torch.int64).max
"""Larger than any id and any place."""


@dataclass(frozen=True, slots=True)
class Breakers:
    """The sequence breakers of N rows, at most B in a row. A breaker is one of its heads, and its
    tail.

    heads          [N, K] int64, ascending: number of the breaker << HEAD_BITS | head; padding is
                   larger than any head
    tails          [N, T] int64: the tokens of all tails of the row, concatenated
    starts, ends   [N, B] int64: where a breaker's tail begins in `tails`, and its end
    longest_tail   tokens of the longest tail
    """

    heads: Tensor
    tails: Tensor
    starts: Tensor
    ends: Tensor
    longest_tail: int

    def begin_at(self, tokens: Tensor) -> Tensor:
        """Return which of tokens [N, L] are heads of each breaker, [N, B, L] bool."""
        shape = (len(tokens), self.ends.shape[1], tokens.shape[1])
        found = torch.zeros(shape, dtype=torch.bool, device=tokens.device)
        if not self.heads.shape[1]:
            return found
        numbers = torch.arange(shape[1], device=tokens.device)[:, None] << HEAD_BITS
        for some, part in _parts(numbers, found, tokens.numel()):
            wanted = (tokens[:, None] | some).masked_fill_(tokens[:, None] == NO_TOKEN, NO_TOKEN)
            wanted = wanted.flatten(1)
            at = torch.searchsorted(self.heads, wanted).clamp_(max=self.heads.shape[1] - 1)
            part.copy_((self.heads.gather(1, at) == wanted).view(part.shape))
        return found

    @property
    def have_no_tail(self) -> Tensor:
        """Which breakers are one token, [N, B] bool."""
        return self.ends == self.starts


def _parts(numbers: Tensor, found: Tensor, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Split the numbers of breakers [B, 1], and what is found of each [N, B, L]."""
    size = max(1, ITEMS_AT_ONCE // max(1, num_tokens))
    return zip(torch.split(numbers, size), torch.split(found, size, dim=1), strict=True)


@dataclass(frozen=True, slots=True)
class DryRows:
    """The parameters of N rows, [N] each: multiplier and base float32, allowed int64."""

    multiplier: Tensor
    base: Tensor
    allowed: Tensor


def penalise_repeats(logits: Tensor, latest: Tensor, breakers: Breakers, params: DryRows) -> None:
    """Apply DRY to logits [N, V], in place.

    latest   [N, L] int64: the tokens of each row's window, the latest first, then NO_TOKEN
    """
    count = (latest != NO_TOKEN).sum(-1)
    begins = breakers.begin_at(latest)
    limit = length_limit(latest, count, breakers, begins)
    max_exponent = largest_exponent(params.base)
    can_repeat = (limit >= params.allowed) & (count > params.allowed)
    longest = torch.minimum(limit, params.allowed + max_exponent).masked_fill_(~can_repeat, 0)
    lengths = repeat_lengths(latest, longest)
    # The token after the occurrence that ends at distance k from the end is at distance k - 1.
    following = latest[:, :-1].contiguous()
    continues = (lengths >= params.allowed[:, None]) & (latest[:, 1:] != NO_TOKEN)
    continues &= can_repeat[:, None]
    continues &= ~(begins[:, :, :-1] & breakers.have_no_tail[:, :, None]).any(1)
    tokens = following.clamp_min(0)
    repeats = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
    repeats.scatter_reduce_(1, tokens, torch.where(continues, lengths + 1, 0), "amax")
    repeat = repeats.gather(1, tokens)
    exponent = (repeat - 1 - params.allowed[:, None]).clamp_min_(0)
    cost = params.multiplier[:, None] * params.base[:, None] ** exponent.float()
    old = logits.gather(1, tokens)
    logits.scatter_(1, tokens, torch.where(repeat > 0, old - cost, old))


def largest_exponent(base: Tensor) -> Tensor:
    """Return the largest exponent [N] int64 of base [N] in a penalty."""
    exponent = (LARGEST_LOG / base.double().log()).clamp_(0, LARGEST_EXPONENT).to(torch.int64)
    return torch.where(base > SMALLEST_BASE, exponent, 0)


def repeat_lengths(latest: Tensor, longest: Tensor) -> Tensor:
    """Return how many tokens before each distance k = 1 ... L - 1 from the end equal those at the
    end, [N, L - 1] int64, at most longest [N]."""
    rows, places = latest[:, 1:].eq(latest[:, :1]).logical_and_(longest[:, None] > 0).nonzero().T
    lengths = torch.zeros_like(latest[:, 1:])
    lengths[rows, places] = 1
    back = torch.arange(BLOCK, device=latest.device)
    last, done = latest.shape[1] - 1, 1
    while len(rows):
        at = done + back
        later = latest[rows[:, None], at.clamp(max=last)]
        further = places[:, None] + 1 + at
        earlier = latest[rows[:, None], further.clamp(max=last)]
        is_equal = (later == earlier) & (earlier != NO_TOKEN) & (further <= last)
        run = is_equal.long().cumprod(1).sum(1)
        lengths[rows, places] += run
        done += BLOCK
        kept = ((run == BLOCK) & (done < longest[rows])).nonzero().squeeze(1)
        rows, places = rows[kept], places[kept]
    return lengths.minimum(longest[:, None])


def length_limit(latest: Tensor, count: Tensor, breakers: Breakers, begins: Tensor) -> Tensor:
    """Return the number of tokens after the last breaker in each row of `latest` [N, L], [N] int64.
    Without a breaker it is count [N], the number of tokens in the row. `begins` [N, B, L] says
    which tokens are heads of each breaker.

    The last breaker is the one that begins last, and the longest of those. It must end within the
    row: a tail of n tokens needs a head that is at least n tokens from the end.
    """
    rows, nth, at = begins.nonzero().T
    starts = breakers.starts[rows, nth]
    sizes = breakers.ends[rows, nth] - starts
    if breakers.longest_tail:
        back = torch.arange(breakers.longest_tail, device=latest.device)
        places = (starts[:, None] + back).clamp(max=breakers.tails.shape[1] - 1)
        seen = at[:, None] - 1 - back
        is_equal = breakers.tails[rows[:, None], places] == latest[rows[:, None], seen.clamp(min=0)]
        hit = ((is_equal & (seen >= 0)) | (back >= sizes[:, None])).all(1)
        rows, at, sizes = rows[hit], at[hit], sizes[hit]
    # The order of these keys is that of the heads, and among equal heads the longest comes first.
    none = latest.shape[1] * KEY_STEP
    keys = torch.full((len(latest),), none, device=latest.device)
    keys.scatter_reduce_(0, rows, at * KEY_STEP - sizes, "amin")
    head = (keys + KEY_STEP - 1) // KEY_STEP
    return torch.where(keys < none, head - (head * KEY_STEP - keys), count)


# ---- the step


def apply_dry(logits: Tensor, slots: SlotTable, sampled: Sampled) -> None:
    """Apply DRY to the rows of logits [S, V] that use it, in place."""
    if not sampled.features & features.DRY:
        return
    rows = where(slots.host("dry_window")[sampled.host_slots] > 0)
    if not len(rows):
        return
    windows = slots.host("dry_window")[sampled.host_slots[rows]]
    width = int(sampled.host_known[rows].minimum(windows).max())
    for some in torch.split(rows, max(1, ITEMS_AT_ONCE // width)):
        _apply_to(logits, slots, sampled, some)


def _apply_to(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    """Apply DRY to some rows [N], on the host, of logits [S, V], in place."""
    index, slot_ids = rows_and_slots(slots, sampled, rows)
    multiplier, base, allowed, window = (
        slots[name].index_select(0, slot_ids)
        for name in ("dry_multiplier", "dry_base", "dry_allowed", "dry_window")
    )
    tokens, known = known_tokens(slots, sampled, rows, slot_ids)
    host_slots = sampled.host_slots[rows]
    most = int(slots.host("dry_window")[host_slots].max())
    part = logits.index_select(0, index)
    penalise_repeats(
        part,
        latest_tokens(tokens, known.sum(-1), window, most),
        _breakers(slots, host_slots, slot_ids),
        DryRows(multiplier, base, allowed.long()),
    )
    logits.index_copy_(0, index, part)


def latest_tokens(tokens: Tensor, counts: Tensor, window: Tensor, most: int) -> Tensor:
    """Return the last window [N] tokens, at most `most`, of each row of tokens [N, L], which has
    counts [N] tokens: the latest first, then NO_TOKEN."""
    back = torch.arange(min(tokens.shape[1], most), device=tokens.device)
    at = counts[:, None] - 1 - back
    latest = tokens.gather(1, at.clamp(min=0))
    return latest.masked_fill_((at < 0) | (back >= window[:, None]), NO_TOKEN)


def _breakers(slots: SlotTable, host_slots: Tensor, slot_ids: Tensor) -> Breakers:
    """Return the breakers in the slots [N]."""
    heads, _ = listed_ids(slots, "heads_ids", "num_heads", host_slots, slot_ids)
    tails, _ = listed_ids(slots, "tails_ids", "num_tails", host_slots, slot_ids)
    head_ends, _ = listed_ids(slots, "head_ends", "num_breakers", host_slots, slot_ids)
    ends, _ = listed_ids(slots, "tail_ends", "num_tail_ends", host_slots, slot_ids)
    count = slots["num_heads"].index_select(0, slot_ids)[:, None]
    places = torch.arange(heads.shape[1], device=slots.device).expand_as(heads).contiguous()
    ascending = torch.where(_is_listed(head_ends, slots["num_breakers"][slot_ids]), head_ends, END)
    numbers = torch.searchsorted(ascending, places, right=True)
    return Breakers(
        torch.where(places < count, numbers << HEAD_BITS | heads, END),
        tails,
        torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1),
        ends,
        int(slots.host("longest_tail")[host_slots].max()),
    )


def _is_listed(items: Tensor, counts: Tensor) -> Tensor:
    """Return which of items [N, K] are among the first counts [N] of their row."""
    return torch.arange(items.shape[1], device=items.device) < counts[:, None]
