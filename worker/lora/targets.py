"""The modules of a model that adapters can change, by their names in PEFT's files. Needs no torch.

An adapter names modules as the model's Hugging Face checkpoint does, even if the model was loaded
from a GGUF file. The model computes some of these modules as one linear: queries, keys and values,
or the gate and the up projection. A module is then a range of that linear's outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from worker.lora.errors import UnusableAdapter
from worker.spec.facts import ModelFacts
from worker.spec.families.registry import FAMILIES
from worker.spec.kernel_sizes import MAX_TERM_PARTS
from worker.spec.matrices import FusedMatrix
from worker.spec.model_spec import AdaptedLinear, ModelSpec
from worker.spec.tensor_names import RowOrder
from worker.spec.tensors import ModelTensors

LINEARS: tuple[AdaptedLinear, ...] = get_args(AdaptedLinear)
"""The linears of a layer that an adapter can change, in the order of csrc/low_rank.h."""


@dataclass(frozen=True, slots=True)
class Target:
    """A module that an adapter can change: outputs [first, first + outputs) of a linear.

    order   order of the module's outputs in the checkpoint, if it differs from the model's
    """

    layer: int
    linear: AdaptedLinear
    first: int
    outputs: int
    inputs: int
    order: RowOrder | None


def find_targets(spec: ModelFacts) -> dict[str, Target]:
    """Return the modules of a model by name. If checkpoints have one of two prefixes, a module has
    two names. Raises UnusableAdapter if the model cannot have adapters."""
    family = next((each for each in FAMILIES if each.architecture == spec.architecture), None)
    if family is None or not isinstance(spec, ModelSpec):
        raise UnusableAdapter(
            f"LoRA adapters are not supported for {spec.architecture}, which transformers computes"
        )
    names = family.names(spec)
    spelled = [names, names.with_other_prefix] if names.other_prefix else [names]
    return {
        name: target
        for tensors in (ModelTensors(spec, each) for each in spelled)
        for index in range(spec.num_layers)
        for name, target in _layer(tensors, index)
    }


def _layer(tensors: ModelTensors, index: int) -> Iterator[tuple[str, Target]]:
    layer = tensors.layer(index)
    linears: list[tuple[AdaptedLinear, FusedMatrix]] = []
    if layer.mixer is not None:
        mixer_in, *_, mixer_out = layer.mixer.matrices
        linears += [("qkv", mixer_in), ("output", mixer_out)]
    if layer.mlps and layer.router is None:  # the experts of a mixture cannot have adapters
        (only,) = layer.mlps
        linears += [("gate_up", only.gate_up), ("down", only.down)]
    for linear, matrix in linears:
        first = 0
        # Kimi Linear has five: queries, keys, values, and two that make decays and gates. Adapters
        # change only the first three.
        parts = matrix.parts if len(matrix.parts) <= MAX_TERM_PARTS else matrix.parts[:3]
        for part in parts:
            if part.cut is not None:
                break  # the rows of this module are in several places of the linear
            yield part.name, Target(index, linear, first, part.rows, matrix.columns, part.order)
            first += part.rows


def adapter_bytes(spec: ModelFacts, rank: int, number_bytes: int) -> int:
    """Return the memory of an adapter of this rank for all modules of the model, in bytes."""
    return sum(
        rank * (target.inputs + target.outputs) * number_bytes
        for target in {*find_targets(spec).values()}
    )
