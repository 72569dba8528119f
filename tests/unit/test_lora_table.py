"""The worker's table of LoRA adapters: rows and generations, memory, and loading in a thread."""

from __future__ import annotations

import gc
import json
import os
import select
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.config.worker import WorkerConfig
from protocol.worker.steps import AdapterLoad, AdapterReport, AdapterUnload
from tests.support.adapters import new_table, peft_model, random_adapter, write_adapter
from tests.support.checkpoints import random_llama, write_directory
from tests.support.eager import CPU, load
from tests.support.plans import slot_init
from tests.support.tiny_model import tiny_slots
from worker.device.timing import StartupTiming
from worker.errors import UnusableModel
from worker.loading.decoder import LoadedModel
from worker.lora.adapter import AdapterFiles
from worker.lora.service import AdapterService
from worker.lora.startup import kept_bytes, load_adapters
from worker.lora.table import AdapterTable
from worker.lora.targets import adapter_bytes, find_targets
from worker.slots.table import SlotTable


@pytest.fixture(scope="module")
def model() -> Any:
    return random_llama()


@pytest.fixture(scope="module")
def loaded(model: Any, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_directory(tmp_path_factory.mktemp("model"), model))


@pytest.fixture
def root(model: Any, tmp_path: Path) -> Path:
    for seed, name in enumerate(("a", "b"), 1):
        write_adapter(tmp_path / name, peft_model(model, seed=seed))
    return tmp_path


# ---- rows and generations


def bound(*adapters: tuple[int, int]) -> SlotTable:
    """Return a table of slots, each with the given row and generation of an adapter."""
    slots = tiny_slots(len(adapters))
    for slot, (row, generation) in enumerate(adapters):
        slots.bind(slot_init(slot, [1], adapter=row, adapter_generation=generation))
    slots.flush()
    return slots


def rows_of(table: AdapterTable, slots: SlotTable, *counts: int) -> list[int] | None:
    found = table.for_rows(slots, np.arange(len(counts)), np.array(counts))
    return None if found is None else found.of_tokens.tolist()


def test_each_token_gets_the_adapter_of_its_row(loaded):
    table = new_table(loaded, [random_adapter(loaded, seed=seed) for seed in range(2)])
    assert rows_of(table, bound((1, 1), (-1, 0), (0, 1)), 1, 2, 3) == [1, -1, -1, 0, 0, 0]
    assert rows_of(table, bound((-1, 0), (-1, 5)), 1, 2) is None
    assert rows_of(AdapterTable(), bound((-1, 0)), 1) is None


@pytest.mark.parametrize("adapter", [(0, 2), (0, 0), (1, 1), (2, 1), (-2, 1), (99, 1)])
def test_a_slot_with_another_row_or_generation_is_refused(loaded, adapter):
    table = AdapterTable(2, loaded.spec.num_layers)
    table.add(0, 1, random_adapter(loaded, seed=1))
    with pytest.raises(ValueError, match=r"adapter row|not loaded any more"):
        rows_of(table, bound(adapter), 1)
    with pytest.raises(ValueError, match="adapter row"):
        table.check(slot_init(0, [1], adapter=adapter[0], adapter_generation=adapter[1]))


def test_a_row_that_was_reused_does_not_serve_slots_of_its_former_adapter(loaded):
    table = AdapterTable(1, loaded.spec.num_layers)
    table.add(0, 1, random_adapter(loaded, seed=1))
    slots = bound((0, 1))
    table.remove(0, 1)
    table.add(0, 2, random_adapter(loaded, seed=2))
    with pytest.raises(ValueError, match="not loaded any more"):
        rows_of(table, slots, 1)


def test_an_empty_table_does_not_serve_slots_with_an_adapter_as_if_they_had_none(loaded):
    table = AdapterTable(1, loaded.spec.num_layers)
    assert rows_of(table, bound((-1, 0)), 1) is None
    with pytest.raises(ValueError, match="not loaded any more"):
        rows_of(table, bound((0, 1)), 1)


def test_a_row_is_used_by_one_adapter_at_a_time(loaded):
    table = AdapterTable(1, loaded.spec.num_layers)
    table.add(0, 1, random_adapter(loaded, seed=1))
    for row in (0, 1, -1):
        with pytest.raises(ValueError, match="cannot get an adapter"):
            table.add(row, 2, random_adapter(loaded, seed=2))
    with pytest.raises(ValueError, match="generation 1, not generation 2"):
        table.remove(0, 2)
    table.remove(0, 1)
    with pytest.raises(ValueError, match="holds no adapter"):
        table.remove(0, 1)


def test_removing_an_adapter_frees_its_memory(loaded):
    table, adapter = AdapterTable(1, loaded.spec.num_layers), random_adapter(loaded, seed=1)
    tensors = [weakref.ref(tensor) for term in adapter.terms.values() for tensor in term.tensors()]
    table.add(0, 1, adapter)
    assert table.num_bytes == adapter_bytes(loaded.spec, 4, 4) > 0
    table.remove(0, 1)
    del adapter
    gc.collect()
    assert table.num_bytes == 0
    assert not any(reference() is not None for reference in tensors)


# ---- the service


@pytest.fixture
def service(loaded: LoadedModel, root: Path) -> Iterator[AdapterService]:
    files = AdapterFiles(
        find_targets(loaded.spec), str(root), max_rank=8, dtype=torch.float32, device=CPU
    )
    with AdapterService(AdapterTable(2, loaded.spec.num_layers, files)) as service:
        yield service


def report(service: AdapterService) -> AdapterReport:
    """Wait for the next report."""
    while True:
        if (found := service.report()) is not None:
            return found
        assert select.select([service.fd], [], [], 60)[0], "no report came"


def test_an_adapter_is_loaded_and_unloaded(service):
    service.apply(AdapterLoad(row=1, generation=3, path="a"))
    loaded = report(service)
    assert (loaded.row, loaded.generation, loaded.rank, loaded.error) == (1, 3, 4, None)
    assert len(loaded.digest) == 64
    service.apply(AdapterUnload(row=1, generation=3))
    assert report(service) == AdapterReport(row=1, generation=3)
    assert service.report() is None
    assert not select.select([service.fd], [], [], 0)[0], "the descriptor is not readable"


@pytest.mark.parametrize(("path", "code"), [("c", "model_not_found"), ("b", "invalid_request")])
def test_a_failure_is_reported_with_its_field(service, root, path, code):
    config = json.loads((root / "b/adapter_config.json").read_text())
    (root / "b/adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    service.apply(AdapterLoad(row=0, generation=1, path=path))
    error = report(service).error
    assert (error.code, error.param) == (code, "lora_path")
    service.apply(AdapterLoad(row=0, generation=2, path="a"))
    assert report(service).error is None


def test_an_answer_that_comes_while_the_descriptor_is_read_is_not_lost(service, monkeypatch):
    read = os.eventfd_read

    def late_read(fd):
        assert select.select([fd], [], [], 60)[0]
        return read(fd)

    monkeypatch.setattr(os, "eventfd_read", late_read)
    service.apply(AdapterLoad(row=0, generation=1, path="a"))
    assert service.report() is not None


def test_unloading_what_is_not_loaded_is_an_error_of_the_engine(service):
    with pytest.raises(ValueError, match="holds no adapter"):
        service.apply(AdapterUnload(row=0, generation=1))


# ---- at the start


def start(loaded: LoadedModel, **options: Any) -> Any:
    config = WorkerConfig(model="m", **options)
    return load_adapters(config, loaded.spec, torch.float32, CPU, StartupTiming())


def test_adapters_of_the_configuration_get_the_first_rows(loaded, root):
    table, infos = start(loaded, lora=[f"x={root}/b", f"y={root}/a"], max_loras=3)
    assert table.num_rows == 3
    assert [(info.name, info.rank, info.path) for info in infos] == [
        ("x", 4, f"{root}/b"),
        ("y", 4, f"{root}/a"),
    ]
    assert [table[0].digest, table[1].digest] == [info.digest for info in infos]


def test_without_options_there_is_no_table(loaded):
    table, infos = start(loaded)
    assert (table.num_rows, table.files, infos) == (0, None, [])


def test_a_bad_adapter_of_the_configuration_is_named(loaded, root):
    with pytest.raises(UnusableModel, match="adapter x at /nowhere: the adapter's directory has"):
        start(loaded, lora=["x=/nowhere"])


@pytest.mark.parametrize(
    "lora", [["a"], ["=p"], ["a="], ["a:b=p"], ["a=p", "a=q"], [f"a{n}=p" for n in range(9)]]
)
def test_wrong_options_are_refused(lora):
    with pytest.raises(ValueError, match="lora"):
        WorkerConfig(model="m", lora=lora)


def test_memory_is_kept_for_the_rows_that_are_free_at_the_start(loaded):
    whole = adapter_bytes(loaded.spec, 16, 4)
    options: dict[str, Any] = {"lora": ["a=p"], "max_loras": 4, "max_lora_rank": 16}
    kept = [
        kept_bytes(WorkerConfig(model="m", lora_dir=folder, **options), loaded.spec, torch.float32)
        for folder in ("", "/adapters")
    ]
    assert kept == [0, 3 * whole]
