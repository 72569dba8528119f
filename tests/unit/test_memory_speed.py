"""How fast memory is read: measured once, and stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.config.worker import WorkerConfig
from tests.support.tiny_checkpoint import write_tiny_llama
from tools.models.preflight import memory_facts
from worker.device.memory_speed import BUFFER_BYTES, measured_bytes_per_s, read_bytes_per_s
from worker.startup.preflight import preflight


def test_threads_measure_a_speed_that_memory_can_have() -> None:
    assert 1e7 < measured_bytes_per_s(2, BUFFER_BYTES // 8) < 1e14


def test_a_stored_speed_is_used_again(tmp_path: Path) -> None:
    first = read_bytes_per_s(1, tmp_path)
    assert [read_bytes_per_s(1, tmp_path) for _ in range(3)] == [first] * 3
    assert len(list(tmp_path.iterdir())) == 1
    read_bytes_per_s(2, tmp_path)  # other threads are another measurement
    assert len(list(tmp_path.iterdir())) == 2


def test_the_tools_get_the_memory_of_the_device_and_its_stored_speed(tmp_path: Path) -> None:
    facts = memory_facts(tmp_path)
    assert facts is not None
    assert facts.free_bytes > 0
    assert (facts.read_bytes_per_s > 0) == (facts.device == "cpu")
    assert memory_facts(tmp_path).read_bytes_per_s == facts.read_bytes_per_s  # type: ignore[union-attr]


def test_the_check_of_a_model_returns_a_stored_speed_and_measures_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = tmp_path / "measurements"
    (tmp_path / "model").mkdir()
    write_tiny_llama(tmp_path / "model")
    config = WorkerConfig(model=str(tmp_path / "model"), measurements=str(folder))
    found = preflight([config])
    assert (found.error, found.memory) == ("", None)
    assert not folder.exists()
    measured, found = memory_facts(folder), preflight([config])
    assert measured is not None
    assert found.memory is not None
    assert found.memory.read_bytes_per_s == measured.read_bytes_per_s > 0
