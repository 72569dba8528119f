"""The distribution that a token is drawn from, computed in plain Python: the reference for the
sampler's filters. Also the reference for DRY."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from protocol.engine.sampling import SamplingParams, filter_order
from worker.sampling.dry import LARGEST_EXPONENT

USUAL_FILTERS = ("temperature", "top_k", "top_p", "min_p")


def filtered_distribution(
    logits: list[float], params: SamplingParams, *, xtc_u: float = 0.0, mu: float | None = None
) -> dict[int, float]:
    """Return token -> probability after all filters, for one row, by the definition of each
    parameter.

    xtc_u   the random number by which XTC applies or not; 0: if it can apply, it does
    mu      largest surprise of the token, with Mirostat; None: that of the first token
    """
    size = len(logits)
    kept = {token: x for token, x in enumerate(logits) if x > -math.inf}
    order = filter_order(params)
    for name in USUAL_FILTERS if order is None else order:
        kept = _filtered(name, kept, params, xtc_u)
    if params.mirostat:
        kept = limited(kept, params.mirostat, 2 * params.mirostat_tau if mu is None else mu, size)
    shares = probabilities(kept)
    return {token: shares[token] for token in sorted(shares)}


def probabilities(logits: dict[int, float]) -> dict[int, float]:
    """Return token -> probability."""
    peak = max(logits.values())
    mass = {token: math.exp(x - peak) for token, x in logits.items()}
    total = sum(mass.values())
    return {token: each / total for token, each in mass.items()}


def _filtered(
    name: str, logits: dict[int, float], params: SamplingParams, xtc_u: float
) -> dict[int, float]:
    """Return token -> logit for the tokens that one filter keeps."""
    shares = probabilities(logits)
    best = sorted(logits, key=lambda token: -logits[token])
    surprise = {token: -math.log(share) if share else math.inf for token, share in shares.items()}
    entropy = sum(share * surprise[token] for token, share in shares.items() if share)
    if name == "temperature":
        temperature = _temperature(params, entropy, len(logits))
        return {token: (x - logits[best[0]]) / temperature for token, x in logits.items()}
    if name == "top_k" and params.top_k > 0:
        best = best[: params.top_k]
    elif name == "top_p" and params.top_p < 1:
        best = _until(best, shares, params.top_p)
    elif name == "min_p":
        best = [token for token in best if shares[token] >= params.min_p * shares[best[0]]]
    elif name == "typ_p" and params.typical_p < 1:
        nearest = sorted(best, key=lambda token: abs(surprise[token] - entropy))
        best = _until(nearest, shares, params.typical_p)
    elif name == "top_n_sigma" and params.top_n_sigma > 0:
        mean = sum(logits.values()) / len(logits)
        sigma = math.sqrt(sum((x - mean) ** 2 for x in logits.values()) / len(logits))
        least = logits[best[0]] - params.top_n_sigma * sigma
        best = [token for token in best if logits[token] >= least]
    elif name == "xtc" and params.xtc_probability > 0 and xtc_u <= params.xtc_probability:
        num_top = sum(shares[token] >= params.xtc_threshold for token in best)
        best = best[max(num_top - 1, 0) :]
    return {token: logits[token] for token in best}


def limited(logits: dict[int, float], version: int, mu: float, size: int) -> dict[int, float]:
    """Return token -> logit for the tokens that Mirostat keeps, in a vocabulary of `size`."""
    shares = probabilities(logits)
    best = sorted(logits, key=lambda token: -logits[token])
    if version == 2:
        kept = [token for token in best if -math.log2(shares[token] or 1e-300) <= mu]
    else:
        kept = best[: _zipf_count([shares[token] for token in best[:100]], mu, size)]
    return {token: logits[token] for token in kept or best[:1]}


def _zipf_count(shares: list[float], mu: float, size: int) -> int:
    """Return how many tokens version 1 of Mirostat keeps, from the largest shares in descending
    order."""
    steps = [math.log((i + 2) / (i + 1)) for i in range(len(shares) - 1)]
    falls = [math.log(one / two) for one, two in itertools.pairwise(shares)]
    exponent = sum(a * b for a, b in zip(steps, falls, strict=True)) / sum(a * a for a in steps)
    excess = exponent - 1
    return max(int((excess * 2**mu / (1 - size**-excess)) ** (1 / exponent)), 1)


def _temperature(params: SamplingParams, entropy: float, count: int) -> float:
    """Return the temperature for `count` tokens with this entropy."""
    if params.dynatemp_range == 0:
        return params.temperature
    if count == 1:
        return 1.0
    lowest = max(0.0, params.temperature - params.dynatemp_range)
    highest = params.temperature + params.dynatemp_range
    part = min(max(entropy / math.log(count), 0.0), 1.0)
    return lowest + (highest - lowest) * part**params.dynatemp_exponent


def _until(tokens: list[int], shares: dict[int, float], part: float) -> list[int]:
    """Return the first tokens that hold `part` of the mass."""
    so_far, kept = 0.0, []
    for token in tokens:
        kept.append(token)
        so_far += shares[token]
        if so_far >= part:
            break
    return kept


def dry_costs(tokens: Sequence[int], params: SamplingParams) -> dict[int, float]:
    """Return token -> what DRY subtracts from its logit after `tokens`, by comparing each position
    with the end, token by token."""
    count = len(tokens)
    window = count if params.dry_penalty_last_n == -1 else params.dry_penalty_last_n
    text = list(tokens[max(count - window, 0) :])
    allowed = params.dry_allowed_length
    limit = tokens_after_breaker(text, params)
    if params.dry_multiplier == 0 or len(text) <= allowed or limit < allowed:
        return {}
    longest: dict[int, int] = {}
    for place in range(len(text) - 1):
        length = 0
        while length <= place and text[place - length] == text[-1 - length]:
            length += 1
        token = text[place + 1]
        is_breaker = any(token in each.heads and not each.tail for each in params.dry_breakers)
        if min(length, limit) >= allowed and not is_breaker:
            longest[token] = max(longest.get(token, 0), min(length, limit))
    return {
        token: params.dry_multiplier * params.dry_base ** min(length - allowed, LARGEST_EXPONENT)
        for token, length in longest.items()
    }


def tokens_after_breaker(text: list[int], params: SamplingParams) -> int:
    """Return the number of tokens after the breaker that begins last in the text."""
    breakers = [[head, *each.tail] for each in params.dry_breakers for head in each.heads]
    for start in reversed(range(len(text))):
        ends = [start + len(each) for each in breakers if text[start : start + len(each)] == each]
        if ends:
            return len(text) - max(ends)
    return len(text)
