"""Measures what one watcher of /v1/watch costs the gateway and the engine while many streams run.

    python -m tests.benchmarks.watch_cost [--streams 64] [--rounds 6] [--seconds 8]
                                           [--gpu L40S]

The engine and two gateways are real, and the worker takes the time of a large model on a small GPU,
so a step with 64 rows takes some 30 ms. The first gateway serves the streams. Each answer has 512
tokens, and the next request follows it. The second gateway serves only the watcher, who sees all
requests of the engine. So what a watcher adds to its CPU time is a difference of small numbers,
without the noise of the streams. The result is this difference divided by the first one's CPU time.
(A gateway that does little finds less of its memory in the processor's caches than a busy one, so
the result is rather too high than too low.)

Each round measures four times: without a watcher, twice with one, and without one again, so that a
steady drift cancels. The engine serves both at once, so its growth is a difference of large
numbers, and single rounds differ by several percent. Times are the kernel's, in nanoseconds
(/proc/PID/task/TID/schedstat).

This is a measurement, not a test.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, send_post
from tests.support.paced_server import paced_server

MODEL, GPU = "llama-3.1-8b", "L40S"
PATH, WATCH = "/v1/completions", "/v1/watch"
MAX_LEN = 1 << 12
ANSWER_TOKENS = 512
LAST_CHUNK = b"0\r\n\r\n"
SETTLE_S = 1.0
"""Time between the start or the end of a watcher and the measurement."""
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds of the gateway with the streams, of the watcher's, and of the engine, in a time
    of `wall_s` seconds."""

    streaming: float
    watching: float
    engine: float
    wall_s: float

    def __add__(self, other: CpuTimes) -> CpuTimes:
        return CpuTimes(
            self.streaming + other.streaming,
            self.watching + other.watching,
            self.engine + other.engine,
            self.wall_s + other.wall_s,
        )

    def ms_per_s(self, name: str) -> float:
        """Return the CPU milliseconds per second of one of the three."""
        seconds: float = getattr(self, name)
        return 1000 * seconds / self.wall_s


class Streams:
    """Keeps this many streams open, and reads them in a thread of its own. When an answer ends, the
    next request is sent over the same connection. The first answers have other lengths, so that
    they do not all end at once.

    error   why the thread has ended early, or None
    """

    def __init__(self, port: int, number: int) -> None:
        self.error: Exception | None = None
        dice = random.Random(number)
        self._clients: dict[int, socket.socket] = {}
        self._num_sent = 0
        for _ in range(number):
            client = connect(port)
            self._clients[client.fileno()] = client
            self._send(client, dice.randrange(1, ANSWER_TOKENS))
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _send(self, client: socket.socket, num_tokens: int) -> None:
        self._num_sent += 1
        body = {"prompt": f"{self._num_sent} once", "stream": True, "ignore_eos": True}
        send_post(client, PATH, {**body, "max_tokens": num_tokens})

    def _run(self) -> None:
        poll = select.poll()
        for number in self._clients:
            poll.register(number, select.POLLIN)
        try:
            while not self._stopping:
                for number, _ in poll.poll(100):
                    data = self._clients[number].recv(_READ_BYTES)
                    assert data, "the gateway has closed a connection"
                    if data.endswith(LAST_CHUNK):
                        self._send(self._clients[number], ANSWER_TOKENS)
        except Exception as error:
            self.error = error

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        for client in self._clients.values():
            client.close()


@contextmanager
def open_streams(gateway: GatewayProcess, number: int) -> Iterator[None]:
    """Keep this many streams open inside the `with` block."""
    streams = Streams(gateway.port, number)
    try:
        yield
    finally:
        streams.close()
    if streams.error is not None:
        raise streams.error


def read_frames(client: socket.socket, counts: list[int]) -> None:
    """Read until the end of the connection, and note the length of each part."""
    with contextlib.suppress(OSError):
        while data := client.recv(_READ_BYTES):
            counts.append(len(data))


@contextmanager
def one_watcher(gateway: GatewayProcess) -> Iterator[None]:
    """Read /v1/watch inside the `with` block."""
    counts: list[int] = []
    with connect(gateway.port) as client:
        client.sendall(f"GET {WATCH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        reader = threading.Thread(target=read_frames, args=(client, counts), daemon=True)
        reader.start()
        time.sleep(SETTLE_S)
        yield
        assert counts, "no frame came"
        assert reader.is_alive(), "the stream of frames has ended"
        client.shutdown(socket.SHUT_RDWR)
        reader.join()
    time.sleep(SETTLE_S)


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    threads = [task for p in processes for task in Path(f"/proc/{p.pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in threads) * 1e-9


def measure(processes: Sequence[Sequence[psutil.Process]], seconds: float) -> CpuTimes:
    """Return the CPU times of the next `seconds`.

    processes    those of the gateway with the streams, of the watcher's, and of the engine
    """
    before, began = [cpu_s(group) for group in processes], time.monotonic()
    time.sleep(seconds)
    after, ended = [cpu_s(group) for group in processes], time.monotonic()
    spent = [now - then for then, now in zip(before, after, strict=True)]
    return CpuTimes(spent[0], spent[1], spent[2], ended - began)


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
    config: dict[str, Any] = {"log_requests": False}
    limits = {"max_slots": options.streams, "max_len": MAX_LEN}
    with (
        paced_server(MODEL, options.gpu, gateway=config, **limits) as gateway,
        GatewayProcess(engine=gateway.config["engine"], **config) as other,
        open_streams(gateway, options.streams),
    ):
        other.await_ready()
        time.sleep(3 * SETTLE_S)
        processes = [tree(gateway.process.pid), tree(other.process.pid), engine_processes()]
        print(f"{options.streams} streams of {MODEL} on {options.gpu}; CPU ms per second")
        rows = []
        for number in range(options.rounds):
            first = measure(processes, options.seconds)
            with one_watcher(other):
                watched = measure(processes, 2 * options.seconds)
            plain = first + measure(processes, options.seconds)
            rows.append((plain, watched))
            print(line(f"round {number + 1}", plain, watched), flush=True)
    for name, share in (("gateway", of_gateway), ("engine", of_engine)):
        added = [share(plain, watched) for plain, watched in rows]
        print(
            f"one watcher adds {100 * median(added):+.2f} % of the {name}'s CPU time "
            f"(median of {len(rows)} rounds)"
        )


def of_gateway(plain: CpuTimes, watched: CpuTimes) -> float:
    """Return the CPU time that a watcher adds, as a share of that of the gateway with streams.

    Each time is divided by one of the same period, so a change of the processor's speed cancels.
    """
    before, after = (times.watching / times.streaming for times in (plain, watched))
    return after - before


def of_engine(plain: CpuTimes, watched: CpuTimes) -> float:
    return watched.ms_per_s("engine") / plain.ms_per_s("engine") - 1


def line(title: str, plain: CpuTimes, watched: CpuTimes) -> str:
    parts = [f"streams {(plain + watched).ms_per_s('streaming'):.1f}"]
    for title_of, name, share in (
        ("watcher", "watching", of_gateway),
        ("engine", "engine", of_engine),
    ):
        before, after = plain.ms_per_s(name), watched.ms_per_s(name)
        growth = 100 * share(plain, watched)
        parts.append(f"{title_of} {before:.2f} -> {after:.2f} ({growth:+.2f} %)")
    return f"{title:8} {', '.join(parts)}"


if __name__ == "__main__":
    main()
