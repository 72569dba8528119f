"""Whether the memory of a server's processes is flat, however many requests it has answered.

    python -m tests.benchmarks.memory_slope [--requests 100000] [--clients 8] [--samples PATH]

A real `tidegate serve` with a tiny model; clients on kept-alive connections send small requests of
all APIs: streams and whole answers, bodies that are refused, and some hang up in the middle. After
each hundredth part of the requests the memory of each process is read:

    rss   what is resident, pages of libraries that others share included
    own   what it has written itself and shares with nobody. What clean pages of libraries it shares
          with others depends on the others

Printed is, per process, what it had at first and in the end, and the slope over the later half of
the requests in KiB per 1,000 requests, with its standard error: `trend_of` says how. The first half
is not looked at: pools fill, caches come to their bounds. Ends with 1 where a process grows, see
FLAT.
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
"""KiB per 1,000 requests: 16 bytes a request. Nothing that a process could keep of each request is
so small: the least piece that malloc gives takes 32 bytes, an integer 28, an entry of a dict or a
set more. What is kept of every second request would show, too."""
SAMPLES = 100
LOOK_EVERY_S = 0.05
KV_BLOCKS = 512
"""So few that the prefix cache is full soon: until then it grows, as it should."""
TEMPLATE = "{% for message in messages %}w1 {{ message.content }} {% endfor %}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process at one moment, in KiB."""

    rss: int
    own: int


@dataclass(frozen=True, slots=True, order=True)
class Trend:
    """KiB per 1,000 requests, and the standard error of that."""

    slope: float
    error: float

    @property
    def is_flat(self) -> bool:
        return self.slope <= FLAT


def line_of(points: Sequence[tuple[int, float]]) -> Trend:
    """The line of least squares through (requests, KiB); three points at least."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return Trend(1000 * slope, 1000 * math.sqrt(rest / (count - 2) / spread))


def trend_of(points: Sequence[tuple[int, float]]) -> Trend:
    """The middle one of three thirds. A heap that once needs more than ever before makes a step in
    one of them; what grows with the requests grows in all."""
    third = len(points) // 3
    parts = points[:third], points[third:-third], points[-third:]
    return sorted(line_of(part) for part in parts)[1]


@dataclass(slots=True)
class MeasuredProcess:
    """samples   (requests that had ended, memory)"""

    name: str
    pid: int
    samples: list[tuple[int, Memory]] = field(default_factory=list)

    def look(self, num_ended: int) -> None:
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        told = {name: int(kib) for name, kib in re.findall(r"(\w+): +(\d+) kB", text)}
        self.samples.append((num_ended, Memory(told["Rss"], told["Private_Dirty"])))

    def trend(self, kind: str) -> Trend:
        later = self.samples[len(self.samples) // 2 :]
        return trend_of([(number, getattr(memory, kind)) for number, memory in later])


NAMES = {
    "-m gunicorn": "gunicorn master",
    "-m gateway.sandbox": "templates",
    "-m engine_core": "engine",
    "-m worker": "worker",
}
"""What a command line has, and who that is: parents come before children."""


def family_of(pid: int) -> list[MeasuredProcess]:
    """The supervisor and all that it has started."""
    found = [MeasuredProcess("supervisor", pid)]
    for child, line in descendants_of(pid):
        (name,) = [name for words, name in NAMES.items() if words in line]
        is_second = name in (each.name for each in found)
        found.append(MeasuredProcess("gateway process" if is_second else name, child))
    return found


def measure(
    model: Path, num_requests: int, num_clients: int
) -> tuple[list[MeasuredProcess], SmallLoad]:
    """A server, its load, and what its processes had meanwhile."""
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
    said = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        family, load = measure(write_roomy_llama(Path(folder)), said.requests, said.clients)
    took_s = time.monotonic() - began
    print(f"{dict(load.ends)} in {took_s:.0f} s, {said.requests / took_s:.0f} a second")
    print("\n".join([*load.wrong[:10], *table(family)]))
    if said.samples:
        said.samples.write_bytes(msgspec.json.encode(family))
    is_flat = all(process.trend(kind).is_flat for process in family for kind in ("rss", "own"))
    return 0 if is_flat and not load.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
