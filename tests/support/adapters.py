"""LoRA adapters with random weights, written by PEFT, and PEFT's results for comparison."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.loading.decoder import LoadedModel
from worker.lora.adapter import Adapter, LowRankPart, LowRankTerm, read_adapter
from worker.lora.table import AdapterTable
from worker.lora.targets import Target, find_targets
from worker.spec.model_spec import AdaptedLinear

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def peft_model(
    model: Any, *, seed: int = 1, modules: Sequence[str] = MODULES, **config: Any
) -> Any:
    """Return a copy of transformers' model with an adapter whose matrices are random. `config` are
    further fields of PEFT's LoraConfig."""
    import peft

    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, **config}
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(
            copy.deepcopy(model), peft.LoraConfig(target_modules=list(modules), **options)
        ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                spread = 0.5 * parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return adapted


def write_adapter(folder: Path, adapted: Any) -> Path:
    """Write the adapter of a model that `peft_model` returned. Return its directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(folder)
    return folder


def read(folder: Path, loaded: LoadedModel, *, max_rank: int = 64) -> Adapter:
    """Read an adapter for a loaded model."""
    dtype = getattr(torch, loaded.card.dtype)
    return read_adapter(
        folder,
        find_targets(loaded.spec),
        max_rank=max_rank,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def random_adapter(
    loaded: LoadedModel, *, seed: int, rank: int = 4, spread: float = 0.5
) -> Adapter:
    """Return an adapter of all modules with random matrices, made without PEFT."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, loaded.card.dtype)

    def matrix(rows: int, columns: int, inputs: int) -> Tensor:
        values = torch.randn(rows, columns, generator=generator) * spread * inputs**-0.5
        return values.to(dtype)

    by_linear: dict[tuple[int, AdaptedLinear], list[Target]] = {}
    for target in dict.fromkeys(find_targets(loaded.spec).values()):  # some have two names
        by_linear.setdefault((target.layer, target.linear), []).append(target)
    terms = {}
    for place, targets in by_linear.items():
        parts = tuple(
            LowRankPart(rank * n, each.first, 2.0, matrix(rank, each.outputs, rank))
            for n, each in enumerate(targets)
        )
        inputs = targets[0].inputs
        terms[place] = LowRankTerm(matrix(rank * len(parts), inputs, inputs), parts)
    return Adapter(f"adapter {seed} of rank {rank}", rank, terms)


def new_table(loaded: LoadedModel, adapters: Sequence[Adapter]) -> AdapterTable:
    """Return a table whose rows hold these adapters, with generation 1."""
    table = AdapterTable(len(adapters), loaded.spec.num_layers)
    for row, adapter in enumerate(adapters):
        table.add(row, 1, adapter)
    return table


def table_of(loaded: LoadedModel, folders: Sequence[Path]) -> AdapterTable:
    """Return a table whose rows hold these adapters, with generation 1."""
    return new_table(loaded, [read(folder, loaded) for folder in folders])


def logprobs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.double(), -1)
