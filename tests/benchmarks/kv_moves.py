"""Speed of K/V transfers between two workers, and the step times of the source meanwhile.

    python -m tests.benchmarks.kv_moves

Starts a worker with the default model that computes one step after the other, and fetches K/V from
its cache into a worker in this process, with each mover in turn. Prints GB/s (median and best), and
the first worker's step times with and without a transfer.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import zmq

from protocol.config.worker import WorkerConfig
from protocol.wire import codec, sockets
from protocol.wire.arrays import Int32
from protocol.worker.kv import KVExport, KVFetched, PeerSource
from protocol.worker.steps import FromWorker, StepResult, ToWorker, WorkerReady
from tests.support.kv_worker import Shape, Worker
from tests.support.model import smollm2_gguf
from tests.support.plans import slot_init, step_plan
from tests.support.processes import ROOT

MOVERS = ("shm", "zmq", "nixl")
SIZES_MB = (16, 256)
REPEATS = 7
CALM_S = 0.4
SHAPE: dict[str, Any] = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64, "block_tokens": 16}
PROMPT = list(range(100, 132))
LEASE = b"to be measured"


class MoveStepper:
    """A worker process that executes one step after the other, driven by a thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, mover: Any) -> None:
        self.kv_address = f"ipc://{folder}/kv"
        self._socket = sockets.bind_router(context, f"ipc://{folder}/engine")
        config = WorkerConfig(
            model=str(smollm2_gguf()),
            address=f"ipc://{folder}/engine",
            dtype="float32",
            kv_blocks=500,
            kv_export=True,
            kv_address=self.kv_address,
            kv_mover=mover,
        )
        words = [
            sys.executable,
            "-P",
            "-m",
            "worker",
            "--config",
            msgspec.json.encode(config).decode(),
        ]
        self.process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
        self._receive()  # TokenizerRead
        ready = self._receive()
        assert isinstance(ready, WorkerReady), ready
        self.ready = ready
        self.times_ms: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def export(self, blocks: range) -> None:
        """Export blocks of the worker's cache. Call it before `start`."""
        self._send(KVExport(lease=LEASE, blocks=Int32.of(blocks), readers=1 << 30))

    def start(self) -> None:
        """Start to execute steps. Return after the first one, when the worker has received all
        earlier messages."""
        self._thread.start()
        while not self.times_ms:
            time.sleep(0.01)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.process.kill()
        self.process.wait()
        self._socket.close(linger=0)

    def _work(self) -> None:
        """Compute the next token of a request of PROMPT's length again and again."""
        init = slot_init(0, PROMPT, blocks=[1, 2, 3])
        plan = step_plan(1, bind=[init], rows=[(0, 0, len(PROMPT), True)], zero=[1, 2, 3])
        while not self._stop.is_set():
            started = perf_counter()
            self._send(plan)
            while not isinstance(self._receive(), StepResult):
                pass  # a report
            self.times_ms.append((perf_counter() - started) * 1e3)
            plan = step_plan(2, rows=[(0, len(PROMPT), 1, True)])

    def _send(self, message: ToWorker) -> None:
        self._socket.send_multipart([self._identity, *codec.encode(message)])

    def _receive(self) -> FromWorker:
        self._identity, *frames = self._socket.recv_multipart()
        message: Any = codec.Decoder(FromWorker).decode(frames)
        return message


@contextmanager
def pair(mover: Any) -> Iterator[tuple[MoveStepper, Worker]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        stepper = MoveStepper(context, Path(folder), mover)
        shape = Shape(num_blocks=500, model=stepper.ready.model.digest, **SHAPE)
        config = WorkerConfig(model="", kv_mover=mover)
        try:
            with Worker(context, shape, config) as worker:
                worker.cache.rows.fill_(1)
                stepper.export(range(10, 490))
                stepper.start()
                yield stepper, worker
        finally:
            stepper.close()
            context.term()


def measure(mover: Any) -> None:
    with pair(mover) as (stepper, worker):
        for size_mb in SIZES_MB:
            count = -(-size_mb * 1_000_000 // worker.shape.block_bytes)
            move(worker, stepper, count)  # warms up: the first transfer touches new pages
            speeds: list[float] = []
            calm: list[float] = []
            busy: list[float] = []
            for _ in range(REPEATS):
                with steps_of(stepper, calm):
                    time.sleep(CALM_S)
                with steps_of(stepper, busy):
                    speeds.append(move(worker, stepper, count))
            print(f"{mover:5} {size_mb:4} MB: {result(speeds, calm, busy)}", flush=True)


def result(speeds: list[float], calm: list[float], busy: list[float]) -> str:
    median = statistics.median
    return (
        f"{median(speeds):5.2f} GB/s (best {max(speeds):5.2f}); "
        f"a step of the peer takes {median(calm):5.1f} ms (longest {max(calm):5.1f}), "
        f"during a transfer {median(busy):5.1f} ms (longest {max(busy):5.1f})"
    )


@contextmanager
def steps_of(stepper: MoveStepper, times_ms: list[float]) -> Iterator[None]:
    """Append the times of the steps during the `with` block to `times_ms`, including that of the
    step that is running when the block ends."""
    first = len(stepper.times_ms)
    yield
    last = len(stepper.times_ms)
    while len(stepper.times_ms) <= last:
        time.sleep(0.001)
    times_ms += stepper.times_ms[first:]


def move(worker: Worker, stepper: MoveStepper, count: int) -> float:
    """Fetch `count` blocks. Return the speed in GB/s, from the command to the report."""
    job = len(worker.results)
    started = perf_counter()
    source = PeerSource(address=stepper.kv_address, lease=LEASE)
    worker.fetch(job, source, list(range(1, 1 + count)), 60)
    end = worker.result_of(job)
    assert isinstance(end, KVFetched), end
    return end.num_bytes / 1e9 / (perf_counter() - started)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    for mover in MOVERS:
        if mover == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
            print("nixl: nixl-cu12 is not installed")
            continue
        measure(mover)


if __name__ == "__main__":
    main()
