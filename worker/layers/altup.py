"""AltUp, as Gemma 3n has it: several streams of hidden states, of which each layer computes one
(`AltUpSpec`).

Each operation on the streams is elementwise, with one rounding, so a token has the same bits in
every step.

Legend: T tokens of the step, N streams, P numbers of a layer's inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.kernels.base import Kernels
from worker.layers.layer_inputs import InputGate
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.spec.altup_spec import AltUpSpec

LEAST_SQUARE = 1e-5
"""The least mean square of a stream that is divided by its magnitude."""


@dataclass(slots=True)
class StreamEnds:
    """What makes the streams before the first layer, and merges them after the last one. Both give
    each stream the magnitude of the first one.

    spread   [T, hidden] to [T, (N - 1) * hidden]
    merge    [T, hidden] to [T, hidden], for each stream but the first
    """

    spread: Linear
    merge: Sequence[Linear]

    def spread_out(self, x: Tensor) -> Tensor:
        """Return the streams [N, T, hidden] of the embeddings x [T, hidden]."""
        others = self.spread(x).view(len(x), len(self.merge), -1)
        return torch.cat([x[None], _resized(others.transpose(0, 1), x)])

    def merged(self, streams: Tensor) -> Tensor:
        """Return the hidden states [T, hidden] that the output head reads."""
        total = streams[0].clone()
        for linear, stream in zip(self.merge, streams[1:], strict=True):
            total.add_(_resized(linear(stream), streams[0]))
        return total.div_(len(streams))

    def tensors(self) -> Iterator[Tensor]:
        for linear in (self.spread, *self.merge):
            yield from linear.tensors()


@dataclass(slots=True)
class AltUp:
    """What one layer does with the streams.

    router        [T, hidden] to [T, N]
    router_norm   of the router's input; its weight includes the factor 1 / hidden
    predictions   [N * N, N] makes the coefficients of a prediction of the router's results
    corrections   [N, N] makes those of a correction
    scale         [hidden] float32, what the active stream is multiplied by before it chooses among
                  the per-layer inputs; None: it is not
    inputs        what the layer does with its per-layer inputs
    """

    spec: AltUpSpec
    router: Linear
    router_norm: Norm
    predictions: Tensor
    corrections: Tensor
    scale: Tensor | None
    inputs: InputGate

    def predicted(self, streams: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """Return the prediction [N, T, hidden] of the streams after the layer, and a copy of its
        active stream."""
        count, tokens = len(streams), streams.shape[1]
        routed = self._routed(streams[self.spec.active], kernels)
        of_pairs = _products(routed, self.predictions).view(count, count, tokens, 1)
        change = streams[0] * of_pairs[:, 0]
        for index in range(1, count):
            change.add_(streams[index] * of_pairs[:, index])
        predicted = change.add_(streams).to(streams.dtype).contiguous()
        return predicted, predicted[self.spec.active].clone()

    def corrected(self, predicted: Tensor, x: Tensor, inputs: Tensor, kernels: Kernels) -> Tensor:
        """Return the streams [N, T, hidden] after the layer.

        predicted   [N, T, hidden] the prediction
        x           [T, hidden] what the layer computed of the active stream
        inputs      [T, P] the layer's inputs
        """
        of_streams = _products(self._routed(x, kernels), self.corrections).add_(1.0)
        change = (x - predicted[self.spec.active]) * of_streams[:, :, None]
        streams = change.add_(predicted).to(predicted.dtype).contiguous()
        active = streams[self.spec.active]
        if self.scale is not None:
            active = (active * self.scale).to(active.dtype)
        streams[1:].add_(self.inputs.norm(self.inputs(active, inputs, kernels)))
        return streams

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear except the router."""
        return self.inputs.linears

    def tensors(self) -> Iterator[Tensor]:
        yield from self.router.tensors()
        yield from self.router_norm.tensors()
        yield from (self.predictions, self.corrections)
        if self.scale is not None:
            yield self.scale
        yield from self.inputs.tensors()

    def _routed(self, x: Tensor, kernels: Kernels) -> Tensor:
        """Return the results [T, N] float32 of the router for x [T, hidden]."""
        scores = self.router(self.router_norm(x)).float()
        # The hyperbolic tangent of the scores. That of torch rounds in another way at the end of
        # a tensor.
        return kernels.sigmoid(scores.mul_(2.0)).mul_(2.0).sub_(1.0)


def _products(x: Tensor, matrix: Tensor) -> Tensor:
    """Return the product [out, T] float32 of matrix [out, in] and x [T, in]."""
    total = matrix[:, :1] * x[:, 0]
    for column in range(1, x.shape[1]):
        total.add_(matrix[:, column, None] * x[:, column])
    return total.contiguous()


def _resized(x: Tensor, like: Tensor) -> Tensor:
    """Return x [..., T, hidden] with the magnitude of each token in `like` [T, hidden]."""
    wanted = _mean_square(like).sqrt_()
    return (x * wanted / _mean_square(x).clamp_(min=LEAST_SQUARE).sqrt_()).to(like.dtype)


def _mean_square(x: Tensor) -> Tensor:
    return x.float().square().mean(dim=-1, keepdim=True)
