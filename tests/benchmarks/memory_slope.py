"""Measures whether the memory of a server's processes grows with the number of requests.

    python -m tests.benchmarks.memory_slope [--requests 100000] [--clients 8] [--samples PATH]

The server is a real `tidegate serve` with a tiny model. Clients on kept-alive connections send
small requests of all APIs: streams, whole answers, bodies that are refused, and streams that they
leave. The memory of each process is read a hundred times:

    rss   resident memory, including pages of libraries that other processes share
    own   resident memory that the process has written and does not share

For each process, the first and last value and the slope are printed. The slope is in KiB per 1,000
requests with its standard error, over the later half of the requests (`trend_of`). The first half
is ignored, because pools and caches fill up. The exit code is 1 if a process grows by more than
FLAT, or if a request did not end as expected.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.benchmarks.small_requests import NAME, SmallLoad
from tests.support.processes import descendants_of
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_roomy_llama

FLAT = 16.0
"""Largest slope in KiB per 1,000 requests, which is 16 bytes a request. Any object that is kept for
each request is larger: malloc's smallest allocation takes 32 bytes, and a Python integer 28."""
SAMPLES = 100
LOOK_EVERY_S = 0.05
KV_BLOCKS = 512
"""A small number, so that the prefix cache is soon full. It grows until then."""
TEMPLATE = "{% for message in messages %}w1 {{ message.content }} {% endfor %}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one process at one moment, in KiB."""

    rss: int
    own: int


@dataclass(frozen=True, slots=True, order=True)
class Trend:
    """A slope in KiB per 1,000 requests, and its standard error."""

    slope: float
    error: float

    @property
    def is_flat(self) -> bool:
        return self.slope <= FLAT


def line_of(points: Sequence[tuple[int, float]]) -> Trend:
    """Return the least-squares slope through at least three points, (requests, KiB)."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return Trend(1000 * slope, 1000 * math.sqrt(rest / (count - 2) / spread))


def trend_of(points: Sequence[tuple[int, float]]) -> Trend:
    """Divide the points into three thirds, and return the trend of the third with the median slope.

    A heap that reaches a new maximum makes a step in one third only. Memory that grows with the
    requests grows in all of them.
    """
    third = len(points) // 3
    parts = points[:third], points[third:-third], points[-third:]
    return sorted(line_of(part) for part in parts)[1]


@dataclass(slots=True)
class MeasuredProcess:
    """A process and its samples: (requests that had ended, memory)."""

    name: str
    pid: int
    samples: list[tuple[int, Memory]] = field(default_factory=list)

    def look(self, num_ended: int) -> None:
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        result = {name: int(kib) for name, kib in re.findall(r"(\w+): +(\d+) kB", text)}
        self.samples.append((num_ended, Memory(result["Rss"], result["Private_Dirty"])))

    def trend(self, kind: str) -> Trend:
        later = self.samples[len(self.samples) // 2 :]
        return trend_of([(number, getattr(memory, kind)) for number, memory in later])


NAMES = {
    "-m gunicorn": "gunicorn master",
    "-m gateway.sandbox": "templates",
    "-m engine_core": "engine",
    "-m worker": "worker",
}
"""Words in the command line of a process -> its name."""


def family_of(pid: int) -> list[MeasuredProcess]:
    """Return the supervisor and all of its descendants."""
    found = [MeasuredProcess("supervisor", pid)]
    for child, line in descendants_of(pid):  # the gunicorn master comes before its children
        (name,) = [name for words, name in NAMES.items() if words in line]
        is_second = name in (each.name for each in found)
        found.append(MeasuredProcess("gateway process" if is_second else name, child))
    return found


def measure(
    model: Path, num_requests: int, num_clients: int
) -> tuple[list[MeasuredProcess], SmallLoad]:
    """Start a server, send it the load, and return its processes and the load."""
    template = model / "template.jinja"
    template.write_text(TEMPLATE)
    options = f"--poison-slots off --max-slots 16 --kv-blocks {KV_BLOCKS} --served-name {NAME}"
    named = ("--chat-template", str(template))
    with Server(*options.split(), *named, model=str(model)) as server:
        family = family_of(server.process.pid)
        load = SmallLoad(server.port, num_requests, num_clients)
        load.start()
        due = 0
        while not load.is_over:
            time.sleep(LOOK_EVERY_S)
            num_ended = load.ends.total()
            if num_ended >= due:
                due = num_ended + num_requests // SAMPLES
                for process in family:
                    process.look(num_ended)
    return family, load


def table(family: Sequence[MeasuredProcess]) -> list[str]:
    rows = [f"{'process':16}{'kind':5}{'start KiB':>11}{'end KiB':>11}  KiB per 1,000 requests"]
    for process in family:
        for kind in ("rss", "own"):
            (_, first), (_, last) = process.samples[0], process.samples[-1]
            trend = process.trend(kind)
            rows.append(
                f"{process.name:16}{kind:5}{getattr(first, kind):11,}{getattr(last, kind):11,}"
                f"  {trend.slope:+8.2f} ± {trend.error:.2f}{'' if trend.is_flat else '  GROWS'}"
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=100_000, help="number of requests")
    parser.add_argument("--clients", type=int, default=8, help="number of clients at the same time")
    parser.add_argument("--samples", type=Path, help="write all samples to this file, as JSON")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        family, load = measure(write_roomy_llama(Path(folder)), options.requests, options.clients)
    took_s = time.monotonic() - began
    print(f"{dict(load.ends)} in {took_s:.0f} s, {options.requests / took_s:.0f} a second")
    print("\n".join([*load.wrong[:10], *table(family)]))
    if options.samples:
        options.samples.write_bytes(msgspec.json.encode(family))
    is_flat = all(process.trend(kind).is_flat for process in family for kind in ("rss", "own"))
    return 0 if is_flat and not load.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
