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
from worker.device.memory_speed import read_bytes_per_s
from worker.startup.check_device import CPU, choose_device


def memory_facts(measurements: Path | None) -> MemoryFacts:
    device = choose_device("auto", visible_devices())
    speed = 0.0
    if device.name == CPU:
        cores, quota = machine.allowed_cores(), machine.cpu_quota()
        threads = machine.choose_threads(0, cores=cores, quota=quota)
        speed = read_bytes_per_s(threads, measurements)
    return MemoryFacts(device=device.name, free_bytes=device.free_bytes, read_bytes_per_s=speed)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(memory_facts(Path(sys.argv[1]))).decode() + "\n")
