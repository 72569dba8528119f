"""Prints the memory of this machine's device, and how fast it is read, as JSON:

    python -P -m worker.startup.memory_facts MEASUREMENTS

MEASUREMENTS is the directory that caches the measurement. torch is not imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from protocol.tools.start_facts import MemoryFacts
from worker.device import machine
from worker.device.environment import visible_devices
from worker.device.memory_speed import read_bytes_per_s, stored_bytes_per_s
from worker.startup.check_device import CPU, ChosenDevice, choose_device


def memory_facts(measurements: Path | None) -> MemoryFacts:
    """Return the facts. The speed is measured if `measurements` does not have it."""
    device, threads = _device_and_threads()
    speed = read_bytes_per_s(threads, measurements) if threads else 0.0
    return MemoryFacts(device=device.name, free_bytes=device.free_bytes, read_bytes_per_s=speed)


def stored_facts(measurements: Path | None) -> MemoryFacts | None:
    """Return the facts without measuring anything; None if `measurements` does not have the
    speed."""
    device, threads = _device_and_threads()
    speed = stored_bytes_per_s(threads, measurements) if threads else 0.0
    if speed is None:
        return None
    return MemoryFacts(device=device.name, free_bytes=device.free_bytes, read_bytes_per_s=speed)


def _device_and_threads() -> tuple[ChosenDevice, int]:
    """Return the device, and how many threads read its memory; 0 for a GPU, whose speed is not
    measured."""
    device = choose_device("auto", visible_devices())
    if device.name != CPU:
        return device, 0
    cores, quota = machine.allowed_cores(), machine.cpu_quota()
    return device, machine.choose_threads(0, cores=cores, quota=quota)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(memory_facts(Path(sys.argv[1]))).decode() + "\n")
