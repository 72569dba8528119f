"""How long a step takes: estimated from the hardware, or fitted to measured steps."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from simulator.hardware import DTYPE_BYTES, Gpu, ModelShape


class StepWork(NamedTuple):
    """The work of one step."""

    #: Rows that compute one token, and the K/V positions that they read.
    decodes: int
    context: int
    #: Chunks of prompts, their tokens, and the pairs of positions in their attention.
    chunks: int = 0
    chunk_tokens: int = 0
    pairs: int = 0


def chunk_pairs(start: int, count: int) -> int:
    """Return how many pairs of positions the attention of a chunk computes: the positions from
    `start` on each read all positions up to their own."""
    return count * start + count * (count + 1) // 2


class StepTimeModel(Protocol):
    """Returns the time of a step. It may be random, so a model belongs to one replica."""

    def seconds(self, work: StepWork) -> float:
        """Return the time from when the worker can start a step until the engine has its result."""
        ...


@dataclass(slots=True)
class Roofline:
    """Estimates a step: it takes as long as its reads or its arithmetic, whichever is longer, plus
    what launches and the exchange between GPUs take."""

    gpu: Gpu
    model: ModelShape
    tensor_parallel: int
    _bandwidth: float = field(init=False)
    _flops: float = field(init=False)
    _shared_bytes: float = field(init=False)
    _shared_flops: float = field(init=False)
    _pair_flops: float = field(init=False)
    _kv_bytes: int = field(init=False)
    _state_bytes: int = field(init=False)
    _step_s: float = field(init=False)
    _token_link_s: float = field(init=False)

    def __post_init__(self) -> None:
        gpu, model, tp = self.gpu, self.model, self.tensor_parallel
        self._bandwidth = tp * gpu.bandwidth * gpu.bandwidth_share
        self._flops = tp * gpu.flops * gpu.flops_share
        self._shared_bytes = DTYPE_BYTES * model.shared_parameters
        active = model.shared_parameters + model.num_experts_per_tok * model.expert_parameters
        self._shared_flops = 2.0 * active
        self._kv_bytes, self._state_bytes = model.kv_bytes, model.state_bytes
        self._pair_flops = 2.0 * model.pair_products * model.attention_layers
        exchanges = 2 * model.num_hidden_layers if tp > 1 else 0  # all-reduces of a step
        self._step_s = 1e-6 * (gpu.step_us + exchanges * gpu.link_us)
        bytes_sent = 2 * (tp - 1) / tp * model.hidden_size * DTYPE_BYTES
        self._token_link_s = exchanges * bytes_sent / gpu.link

    def seconds(self, work: StepWork) -> float:
        decodes, context, chunks, chunk_tokens, pairs = work
        tokens, model = decodes + chunk_tokens, self.model
        read = self._shared_bytes + self._kv_bytes * context
        read += 2 * self._state_bytes * (decodes + chunks)  # each row reads and writes its state
        if model.experts:
            unused = (1 - model.num_experts_per_tok / model.experts) ** tokens
            read += DTYPE_BYTES * model.expert_parameters * model.experts * (1 - unused)
        flops = self._shared_flops * tokens + self._pair_flops * (context + pairs)
        busy_s = max(read / self._bandwidth, flops / self._flops)
        return busy_s + self._step_s + self._token_link_s * tokens


class MeasuredStep(NamedTuple):
    """A step that was timed."""

    work: StepWork
    seconds: float


FIT_ROUNDS = 2000
FIRST_KNOT = 16
"""Up to this number of tokens, the time of a step grows linearly."""
NUM_RATIOS = 64
"""Quantiles that describe how measured steps vary around the fit."""


class FittedSteps:
    """Step times fitted to measured steps, with the variation that was measured.

    A step takes a time that grows with its tokens, piecewise linearly between powers of two, plus a
    time per row, per K/V position that decodes read, and per pair of positions of chunks. No part
    is negative.
    """

    def __init__(self, measured: Sequence[MeasuredStep]) -> None:
        """Raises ValueError if there is no measured step."""
        if not measured:
            raise ValueError("--steps: no step was measured")
        largest = max(step.work.decodes + step.work.chunk_tokens for step in measured)
        self._knots = [0]
        while self._knots[-1] < largest:
            self._knots.append(max(FIRST_KNOT, 2 * self._knots[-1]))
        self._costs = _fit([self._features(step.work) for step in measured], measured)
        num = len(self._knots)
        self._slopes, self._others = self._costs[:num], self._costs[num:]
        self._by_tokens: dict[int, float] = {}
        self._ratios = self._measure_ratios(measured)
        self._random = random.Random(0)

    def for_replica(self, number: int) -> FittedSteps:
        """Return the same fit, with random numbers of its own."""
        other = copy.copy(self)
        other._random = random.Random(number)
        return other

    def seconds(self, work: StepWork) -> float:
        return self.mean_s(work) * self._ratios[int(self._random.random() * NUM_RATIOS)]

    def mean_s(self, work: StepWork) -> float:
        """Return the time of an average step."""
        decodes, context, chunks, chunk_tokens, pairs = work
        tokens = decodes + chunk_tokens
        base = self._by_tokens.get(tokens)
        if base is None:
            parts = zip(self._slopes, self._token_features(tokens), strict=True)
            base = self._by_tokens[tokens] = sum(slope * part for slope, part in parts)
        row_s, context_s, pair_s = self._others
        return base + row_s * (decodes + chunks) + context_s * context + pair_s * pairs

    def error(self, measured: Sequence[MeasuredStep]) -> float:
        """Return the mean deviation of measured steps from the fit, as a share of their time."""
        missed = sum(abs(step.seconds - self.mean_s(step.work)) for step in measured)
        return missed / sum(step.seconds for step in measured)

    def _token_features(self, tokens: int) -> list[float]:
        """Return 1, and how much of `tokens` lies between each pair of knots. The last part has no
        end."""
        ends = [*self._knots[1:-1], 1 << 62]
        parts = zip(self._knots, ends, strict=False)
        return [1.0, *(float(min(max(tokens - start, 0), end - start)) for start, end in parts)]

    def _features(self, work: StepWork) -> list[float]:
        tokens = self._token_features(work.decodes + work.chunk_tokens)
        return [*tokens, work.decodes + work.chunks, work.context, work.pairs]

    def _measure_ratios(self, measured: Sequence[MeasuredStep]) -> list[float]:
        ratios = sorted(step.seconds / self.mean_s(step.work) for step in measured)
        picked = [ratios[len(ratios) * i // NUM_RATIOS] for i in range(NUM_RATIOS)]
        # Long steps must come out right on average: they make up most of the time.
        total = sum(self.mean_s(step.work) for step in measured)
        mean = sum(step.seconds for step in measured) / total
        scale = mean / (sum(picked) / len(picked))
        return [ratio * scale for ratio in picked]


def _fit(rows: Sequence[Sequence[float]], measured: Sequence[MeasuredStep]) -> list[float]:
    """Return the costs, none negative, for which the sums of cost * feature are nearest to the
    measured times: least squares, weighted so that short and long steps count alike."""
    num = len(rows[0])
    scale = [max(row[j] for row in rows) or 1.0 for j in range(num)]
    normal = [[0.0] * num for _ in range(num)]
    right = [0.0] * num
    for row, step in zip(rows, measured, strict=True):
        scaled = [value / size for value, size in zip(row, scale, strict=True)]
        weight = 1 / max(step.seconds, 1e-9)
        for j, value in enumerate(scaled):
            if value:
                right[j] += weight * value * step.seconds
                line, factor = normal[j], weight * value
                for k, other in enumerate(scaled):
                    line[k] += factor * other
    costs = [0.0] * num
    for _ in range(FIT_ROUNDS):  # coordinate descent, which keeps each cost at 0 or above
        for j in range(num):
            if normal[j][j] > 0:
                line = normal[j]
                rest = sum([line[k] * costs[k] for k in range(num)]) - line[j] * costs[j]
                costs[j] = max(0.0, (right[j] - rest) / line[j])
    return [cost / size for cost, size in zip(costs, scale, strict=True)]
