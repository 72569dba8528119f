"""Measures what one watcher of /v1/watch costs the gateway, in CPU time, while many streams run.

    python -m tests.benchmarks.watch_cost [--streams 64] [--rounds 6] [--seconds 8]
                                           [--gpu L40S]

Gateway and engine are real, and the worker takes the time of a large model on a small GPU, so a
step with 64 rows takes some 30 ms. Each round measures four times: without a watcher, twice with
one, and without one again, so that a steady drift cancels. It prints the CPU time of all processes
of the gateway per megabyte that the streams have sent, without and with a watcher, and their
difference. The last lines have the medians. The engine's CPU time is measured, too. Times are the
kernel's, in nanoseconds (/proc/PID/task/TID/schedstat).

This is a measurement, not a test. Other work on the machine makes single rounds differ.
"""

from __future__ import annotations

import argparse
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, send_post
from tests.support.paced_server import paced_server

MODEL, GPU = "llama-3.1-8b", "L40S"
PATH, WATCH = "/v1/completions", "/v1/watch"
MAX_LEN = 1 << 15
SETTLE_S = 1.0
"""Time between the start or the end of a watcher and the measurement."""
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StreamCost:
    """CPU seconds of the gateway and of the engine, and megabytes that the streams have sent."""

    gateway: float
    engine: float
    megabytes: float

    def __add__(self, other: StreamCost) -> StreamCost:
        return StreamCost(
            self.gateway + other.gateway,
            self.engine + other.engine,
            self.megabytes + other.megabytes,
        )


class Readers:
    """Reads the streams in a thread of its own, and counts their bytes."""

    def __init__(self, clients: Sequence[socket.socket]) -> None:
        self.num_bytes = 0
        self.num_ended = 0
        self._clients = {client.fileno(): client for client in clients}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        for number in self._clients:
            poll.register(number, select.POLLIN)
        while not self._stopping:
            for number, _ in poll.poll(100):
                data = self._clients[number].recv(_READ_BYTES)
                self.num_bytes += len(data)
                if not data:
                    self.num_ended += 1
                    poll.unregister(number)

    def close(self) -> None:
        self._stopping = True
        self._thread.join()


@contextmanager
def open_streams(gateway: GatewayProcess, number: int) -> Iterator[Readers]:
    """Keep this many streams open, and read them."""
    with ExitStack() as stack:
        clients = []
        for place in range(number):
            client = stack.enter_context(connect(gateway.port))
            body = {"prompt": f"{place} once", "stream": True, "ignore_eos": True}
            send_post(client, PATH, {**body, "max_tokens": MAX_LEN - 100})
            clients.append(client)
        readers = Readers(clients)
        stack.callback(readers.close)
        yield readers


@contextmanager
def one_watcher(gateway: GatewayProcess) -> Iterator[None]:
    """Read /v1/watch inside the `with` block."""
    with connect(gateway.port) as client:
        client.sendall(f"GET {WATCH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        readers = Readers([client])
        try:
            time.sleep(SETTLE_S)
            yield
            assert readers.num_bytes > 0, "no frame came"
            assert not readers.num_ended, "the stream of frames has ended"
        finally:
            readers.close()
    time.sleep(SETTLE_S)


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    threads = [task for p in processes for task in Path(f"/proc/{p.pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in threads) * 1e-9


def measure(
    gateway: Sequence[psutil.Process],
    engine: Sequence[psutil.Process],
    readers: Readers,
    seconds: float,
) -> StreamCost:
    """Return the cost of the next `seconds`."""
    before = cpu_s(gateway), cpu_s(engine), readers.num_bytes
    time.sleep(seconds)
    after = cpu_s(gateway), cpu_s(engine), readers.num_bytes
    spent = [now - then for then, now in zip(before, after, strict=True)]
    return StreamCost(spent[0], spent[1], spent[2] * 1e-6)


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def engine_processes() -> list[psutil.Process]:
    """Return the engine that this program has started, without its worker."""
    own = psutil.Process().children()
    return [process for process in own if "engine_core" in process.cmdline()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--gpu", default=GPU, help="a GPU of the simulator's table")
    options = parser.parse_args()
    config = {"log_requests": False}
    limits = {"max_slots": options.streams, "max_len": MAX_LEN}
    with (
        paced_server(MODEL, options.gpu, gateway=config, **limits) as gateway,
        open_streams(gateway, options.streams) as readers,
    ):
        time.sleep(3 * SETTLE_S)
        ours, engine = tree(gateway.process.pid), engine_processes()
        print(f"{options.streams} streams of {MODEL} on {options.gpu}; CPU ms per megabyte")
        rows = []
        for number in range(options.rounds):
            first = measure(ours, engine, readers, options.seconds)
            with one_watcher(gateway):
                watched = measure(ours, engine, readers, 2 * options.seconds)
            plain = first + measure(ours, engine, readers, options.seconds)
            rows.append((plain, watched))
            print(line(f"round {number + 1}", plain, watched), flush=True)
        assert not readers.num_ended, "a stream has ended during the measurement"
    for name in ("gateway", "engine"):
        added = [growth(name, plain, watched) for plain, watched in rows]
        share = f"{100 * median(added):+.2f} % of the {name}'s CPU time"
        print(f"one watcher adds {share} (median of {len(rows)} rounds)")


def per_megabyte(name: str, cost: StreamCost) -> float:
    seconds: float = getattr(cost, name)
    return seconds / cost.megabytes


def growth(name: str, plain: StreamCost, watched: StreamCost) -> float:
    return per_megabyte(name, watched) / per_megabyte(name, plain) - 1


def line(title: str, plain: StreamCost, watched: StreamCost) -> str:
    parts = []
    for name in ("gateway", "engine"):
        before, after = (1000 * per_megabyte(name, cost) for cost in (plain, watched))
        parts.append(
            f"{name} {before:.1f} -> {after:.1f} ({100 * growth(name, plain, watched):+.2f} %)"
        )
    return f"{title:8} {', '.join(parts)}"


if __name__ == "__main__":
    main()
