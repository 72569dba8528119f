"""Finds out which of several names for the same tensors a model's files have. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from worker.spec.matrices import Shape
from worker.spec.model_spec import ModelSpec
from worker.spec.tensor_names import TensorNames
from worker.spec.tensors import ModelTensors


def with_found_names(
    names: TensorNames, spec: ModelSpec, found: Mapping[str, Shape]
) -> TensorNames:
    """Return `names` as the files spell them: of a role with several names, the one with which the
    fewest tensors are missing.

    found   name -> shape of each tensor in the files
    """
    for role, others in names.others.items():
        spelled = (
            replace(names, roles={**names.roles, role: name})
            for name in (names.roles[role], *others)
        )
        names = min(spelled, key=lambda each: _num_missing(ModelTensors(spec, each), found))
    return names


def _num_missing(tensors: ModelTensors, found: Mapping[str, Shape]) -> int:
    return sum(found.get(name) != shape for name, shape in tensors.tensors())
