"""Loads the adapters of the configuration, and plans the memory of later ones."""

from __future__ import annotations

import torch

from protocol.config.worker import WorkerConfig
from protocol.engine.adapters import AdapterInfo, split_adapter
from worker.device.timing import StartupTiming
from worker.errors import UnusableModel
from worker.lora.adapter import AdapterFiles
from worker.lora.errors import UnusableAdapter
from worker.lora.table import AdapterTable
from worker.lora.targets import adapter_bytes, find_targets
from worker.spec.facts import ModelFacts


def load_adapters(
    config: WorkerConfig,
    spec: ModelFacts,
    dtype: torch.dtype,
    device: torch.device,
    timing: StartupTiming,
) -> tuple[AdapterTable, list[AdapterInfo]]:
    """Return the table of adapters, with those of the configuration in its first rows, and
    the facts about them for the engine. Raises UnusableAdapter, naming the adapter, if one cannot
    be loaded, or if the model cannot have adapters."""
    if not config.adapter_rows:
        return AdapterTable(), []
    infos: list[AdapterInfo] = []
    with timing("load adapters"):
        files = AdapterFiles(
            find_targets(spec),
            config.lora_dir,
            max_rank=config.max_lora_rank,
            dtype=dtype,
            device=device,
        )
        table = AdapterTable(config.adapter_rows, spec.num_layers, files)
        for row, (name, path) in enumerate(map(split_adapter, config.lora)):
            try:
                adapter = files.read(path, is_trusted=True)
            except UnusableModel as error:
                raise UnusableAdapter(
                    f"the LoRA adapter {name} at {path}: {error.message}",
                    remedy="correct --lora",
                ) from None
            table.add(row, 1, adapter)
            infos.append(
                AdapterInfo(name=name, digest=adapter.digest, rank=adapter.rank, path=path)
            )
    return table, infos


def kept_bytes(config: WorkerConfig, spec: ModelFacts, dtype: torch.dtype) -> int:
    """Return how many bytes to keep free for adapters that are loaded while the server runs. Each
    free row of the adapter table is counted as the largest possible adapter: `max_lora_rank`, for
    all modules. Return 0 without `lora_dir`, because no adapter can be loaded then."""
    if not config.lora_dir:
        return 0
    rows = config.adapter_rows - len(config.lora)
    return rows * adapter_bytes(spec, config.max_lora_rank, dtype.itemsize)
