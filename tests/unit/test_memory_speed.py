"""How fast memory is read: measured once, and stored."""

from __future__ import annotations

from pathlib import Path

from tools.models.preflight import memory_facts
from worker.device.memory_speed import BUFFER_BYTES, measured_bytes_per_s, read_bytes_per_s


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
