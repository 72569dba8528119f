"""The distribution that a token is drawn from, computed in plain Python: the reference for the
sampler's filters."""

from __future__ import annotations

import math

from protocol.engine.sampling import SamplingParams


def filtered_distribution(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Return token -> probability after all filters, for one row, by the definition of each
    parameter."""
    peak = max(logits)
    mass = {t: math.exp((x - peak) / params.temperature) for t, x in enumerate(logits)}
    best = sorted(mass, key=lambda t: -mass[t])
    if 0 < params.top_k < len(best):
        best = best[: params.top_k]
    total, so_far, nucleus = sum(mass[t] for t in best), 0.0, []
    for token in best:
        nucleus.append(token)
        so_far += mass[token]
        if so_far >= params.top_p * total and params.top_p < 1:
            break
    chosen = sorted(t for t in nucleus if mass[t] >= params.min_p * mass[best[0]])
    total = sum(mass[t] for t in chosen)
    return {t: mass[t] / total for t in chosen}
