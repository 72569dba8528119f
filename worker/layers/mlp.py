"""MLPs: plain, gated, and mixtures of experts.

Legend: N rows, I intermediate size, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softmax

from worker.kernels.base import Kernels
from worker.layers.group import Group
from worker.layers.linear import Linear
from worker.layers.low_rank import LayerAdapters, adapted
from worker.layers.norm import Norm
from worker.spec.model_spec import MlpSpec


@dataclass(slots=True)
class Mlp:
    """An MLP, or one expert. `gate_up` returns one tensor [N, 2 I]: the I columns of the gate, then
    those of the up projection. Without a gate it returns the up projection, [N, I]."""

    spec: MlpSpec
    gate_up: Linear
    down: Linear

    def __call__(
        self, x: Tensor, kernels: Kernels, adapters: LayerAdapters | None = None
    ) -> Tensor:
        """Return the result [N, hidden] for x [N, hidden]."""
        inner = adapted(adapters, "gate_up", x, self.gate_up(x))
        spec = self.spec
        if spec.gate_scale != 1.0:
            inner[:, : spec.intermediate].mul_(spec.gate_scale)
        if spec.gate_cutoff is not None:
            keep_largest(inner[:, : spec.intermediate], spec.gate_cutoff)
        active = kernels.activate(inner, spec)
        result = adapted(adapters, "down", active, self.down(active))
        return result if spec.result_scale == 1.0 else result.mul_(spec.result_scale)

    @property
    def experts(self) -> Sequence[Mlp]:
        return (self,)

    @property
    def linears(self) -> list[tuple[Any, str]]:
        return [(self, "gate_up"), (self, "down")]

    def tensors(self) -> Iterator[Tensor]:
        yield from self.gate_up.tensors()
        yield from self.down.tensors()


def keep_largest(gates: Tensor, cutoff: float) -> None:
    """Subtract from the gates [N, I] of each row their mean plus `cutoff` standard deviations, and
    make those zero that are below."""
    numbers = gates.float()
    mean = numbers.mean(dim=-1, keepdim=True)
    deviation = (numbers - mean).square_().mean(dim=-1, keepdim=True).sqrt_()
    # Two operations: one that multiplies and adds could round in another way at the end of a row.
    gates.sub_(deviation.mul_(cutoff).add_(mean)).relu_()


@dataclass(slots=True)
class SharedExpert:
    """An expert that computes every row. Its result is multiplied by the sigmoid of `score`
    [N, 1]; None: it is not."""

    mlp: Mlp
    score: Linear | None

    def __call__(self, x: Tensor, kernels: Kernels) -> Tensor:
        """Return the result [N, hidden] for x [N, hidden]."""
        result = self.mlp(x, kernels)
        return result if self.score is None else result.mul_(kernels.sigmoid(self.score(x)))

    def tensors(self) -> Iterator[Tensor]:
        yield from self.mlp.tensors()
        if self.score is not None:
            yield from self.score.tensors()


@dataclass(slots=True)
class Latent:
    """The linears around experts that read and return L numbers, fewer than the hidden states have.

    inputs    makes what the experts read: [N, L]
    outputs   makes hidden states of the sum of their results
    """

    inputs: Linear
    outputs: Linear

    def tensors(self) -> Iterator[Tensor]:
        yield from self.inputs.tensors()
        yield from self.outputs.tensors()


@dataclass(slots=True)
class ExpertMlp:
    """A mixture of experts: the router chooses `top_k` experts for each row. Each rank of a group
    has some of the experts, and the ranks add their results.

    first         number of the first of `experts`
    group         None: all experts are here
    shared        its result is added; None: there is none
    choice_bias   [E] float32, added to the weights of the experts for the choice only
    router_norm   norm of the router's input; None: there is none
    factors       [E] float32, what the weights of chosen experts are multiplied by; None: they are
                  not
    latent        linears around the experts; None: the experts read and return hidden states
    """

    spec: MlpSpec
    router: Linear
    experts: Sequence[Mlp]
    first: int = 0
    group: Group | None = None
    shared: SharedExpert | None = None
    choice_bias: Tensor | None = None
    router_norm: Norm | None = None
    factors: Tensor | None = None
    latent: Latent | None = None

    def __call__(
        self,
        x: Tensor,
        kernels: Kernels,
        adapters: LayerAdapters | None = None,
        *,
        routed_by: Tensor | None = None,
    ) -> Tensor:
        """Return the result [N, hidden] for x [N, hidden]. Each expert computes all its rows at
        once, and the results are added in the order of the experts. Experts have no adapters.

        routed_by   [N, hidden] the input of the router; None: x
        """
        weights, chosen = self._route(x if routed_by is None else routed_by, kernels)
        read = x if self.latent is None else self.latent.inputs(x)
        total = torch.zeros_like(read)
        last = self.first + len(self.experts)
        for index in torch.unique(chosen).tolist():
            if not self.first <= index < last:
                continue
            rows, place = torch.where(chosen == index)
            own, weight = read.index_select(0, rows), weights[rows, place, None]
            expert = self.experts[index - self.first]
            if self.spec.weighs_inputs:
                part = expert(own * weight, kernels)
            else:
                part = expert(own, kernels) * weight
            total.index_add_(0, rows, part)
        if self.latent is not None:
            total = self.latent.outputs(total)
        if self.shared is not None:
            total.add_(self.shared(x, kernels))
        return total if self.group is None else self.group.sum(total)

    def _route(self, x: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """Return (weights, experts) of each row: [N, top_k] in x's dtype, and [N, top_k] int64."""
        spec = self.spec
        scores = self.router(x if self.router_norm is None else self.router_norm(x)).float()
        if spec.router == "sparsemixer":
            weights, chosen = _sparse_mix(scores, spec)
            return weights.to(x.dtype), chosen
        is_softmax = spec.router == "softmax"
        weights = softmax(scores, dim=-1) if is_softmax else kernels.sigmoid(scores)
        biased = weights if self.choice_bias is None else weights + self.choice_bias
        if spec.num_groups > 1:
            biased = _within_groups(biased, spec)
        chosen = torch.topk(biased, spec.top_k, dim=-1).indices
        weights = weights.gather(-1, chosen)
        if spec.renormalize:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total + spec.sum_eps)
        if spec.expert_scale != 1.0:
            weights = weights * spec.expert_scale
        if self.factors is not None:
            weights = weights * self.factors[chosen]
        return weights.to(x.dtype), chosen

    def tensors(self) -> Iterator[Tensor]:
        yield from self.router.tensors()
        for vector in (self.choice_bias, self.factors):
            if vector is not None:
                yield vector
        if self.router_norm is not None:
            yield from self.router_norm.tensors()
        for expert in self.experts:
            yield from expert.tensors()
        for part in (self.shared, self.latent):
            if part is not None:
                yield from part.tensors()

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear except those that stay dense."""
        mlps = [*self.experts, *([self.shared.mlp] if self.shared else [])]
        latent = [(self.latent, name) for name in ("inputs", "outputs")] if self.latent else []
        return [*((mlp, name) for mlp in mlps for name in ("gate_up", "down")), *latent]


def _sparse_mix(scores: Tensor, spec: MlpSpec) -> tuple[Tensor, Tensor]:
    """Return (weights, experts) of a sparse mixer, [N, top_k] each, for scores [N, E]. The best of
    the experts that are left is chosen, one after the other. Its weight is its softmax among those
    whose scores are near its own. Source: SparseMixer-v2, arXiv 2409.12136."""
    chosen, weights, left = [], [], scores
    for _ in range(spec.top_k):
        best, expert = left.max(dim=-1, keepdim=True)
        distance = (best - scores) / scores.abs().clamp(min=best)
        near = left.masked_fill(distance > 2 * spec.jitter, -torch.inf)
        weights.append(softmax(near, dim=-1).gather(-1, expert))
        chosen.append(expert)
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)


def _within_groups(weights: Tensor, spec: MlpSpec) -> Tensor:
    """Return weights [N, E] with minus infinity for the experts of the groups that are not
    chosen."""
    groups = weights.view(len(weights), spec.num_groups, -1)
    best = torch.topk(groups, spec.group_weights, dim=-1).values.sum(dim=-1)
    chosen = torch.topk(best, spec.top_groups, dim=-1).indices
    is_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
    return groups.masked_fill(is_out[:, :, None], -torch.inf).flatten(1)


@dataclass(slots=True)
class ExpertsBeside:
    """Experts beside an MLP, as Gemma 4 has them. They read the hidden states that the MLP reads,
    through a norm of their own, and both results have a norm.

    mlp_norm      norm of the MLP's result
    norm          norm of the experts' input
    result_norm   norm of the experts' result
    """

    mlp_norm: Norm
    norm: Norm
    experts: ExpertMlp
    result_norm: Norm

    def __call__(self, x: Tensor, of_mlp: Tensor, kernels: Kernels) -> Tensor:
        """Return the sum [N, hidden] of the norms of both results.

        x        [N, hidden] the hidden states
        of_mlp   [N, hidden] the result of the MLP
        """
        of_experts = self.experts(self.norm(x), kernels, routed_by=x)
        return self.mlp_norm(of_mlp).add_(self.result_norm(of_experts))

    def tensors(self) -> Iterator[Tensor]:
        for part in (self.mlp_norm, self.norm, self.experts, self.result_norm):
            yield from part.tensors()
