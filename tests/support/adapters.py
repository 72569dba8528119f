"""LoRA adapters with random weights, written by PEFT, and PEFT's results for comparison."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.lora.adapter import Adapter, read_adapter
from worker.lora.table import AdapterTable
from worker.lora.targets import find_targets
from worker.models.load import LoadedModel

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


def table_of(loaded: LoadedModel, folders: Sequence[Path]) -> AdapterTable:
    """Return a table whose rows hold these adapters, with generation 1."""
    table = AdapterTable(len(folders), loaded.spec.num_layers)
    for row, folder in enumerate(folders):
        table.add(row, 1, read(folder, loaded))
    return table


def logprobs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.double(), -1)
