"""Workers that only transfer K/V, with real caches, in this process and in others.

START, with JSON as its argument, is such a worker. It fills its cache from a seed, executes the
commands on its stdin, which `Peer` sends, and prints each lease that its readers have taken.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Self

import msgspec
import numpy as np
import torch
import zmq
from torch import Tensor

from protocol.config.worker import WorkerConfig
from protocol.wire.arrays import Int32
from protocol.worker.kv import (
    KVExport,
    KVFailure,
    KVFetch,
    KVFetched,
    KVReport,
    KVWithdraw,
    PeerSource,
)
from tests.support.processes import Program
from worker.kv.cache import KVCache, block_bytes
from worker.kv.checkpoint_memory import CheckpointMemory
from worker.kv.layout import KVLayout
from worker.kv.transfer.service import KVTransferService
from worker.kv.transfer.shared_memory import SharedMemory
from worker.spec.facts import KVHeads

WAIT_S = 20.0
START = """
import sys
from worker.device import environment
environment.prepare()  # before torch is imported, like a worker
from tests.support.kv_worker import main
main(sys.argv[1])
"""


def fill(rows: Tensor, seed: int) -> None:
    """Fill `rows` with random numbers below 256, but without `torch.Generator`, which needs a part
    of torch that a worker does not import."""
    drawn = np.random.default_rng(seed).integers(0, 256, size=tuple(rows.shape))
    rows.copy_(torch.from_numpy(drawn))


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a cache and of the checkpoints beside it, and their contents: bytes drawn from
    `seed`, or zeros. Without `num_checkpoints` the model has no recurrent state."""

    num_layers: int = 2
    num_blocks: int = 17
    block_tokens: int = 4
    num_kv_heads: int = 3
    head_dim: int = 8
    dtype: str = "float32"
    model: str = "5eed"
    num_checkpoints: int = 0
    state_items: int = 700
    seed: int | None = None

    @property
    def layout(self) -> KVLayout:
        return KVLayout(
            model=self.model,
            dtype=self.dtype,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_tokens=self.block_tokens,
            state_bytes=self.state_bytes,
        )

    @property
    def state_bytes(self) -> int:
        return 4 * self.state_items if self.num_checkpoints else 0

    @property
    def block_bytes(self) -> int:
        heads = KVHeads(self.num_kv_heads, self.head_dim)
        return block_bytes(self.num_layers, self.block_tokens, heads, getattr(torch, self.dtype))

    def cache(self, shared: SharedMemory | None = None) -> KVCache:
        cache = KVCache(
            self.num_layers,
            self.num_blocks,
            self.block_tokens,
            self.num_kv_heads,
            self.head_dim,
            getattr(torch, self.dtype),
            torch.device("cpu"),
            shared,
        )
        if self.seed is not None:
            fill(cache.rows, self.seed)
        return cache

    def states(self, *, is_shared: bool = False) -> CheckpointMemory | None:
        if not self.num_checkpoints:
            return None
        if is_shared:
            memory = CheckpointMemory.in_shared_memory(self.num_checkpoints, self.state_items)
        else:
            memory = CheckpointMemory(torch.zeros(1 + self.num_checkpoints, self.state_items))
        if self.seed is not None:
            fill(memory.rows, 1 + self.seed)
        return memory


def idle_transfers(context: zmq.Context[zmq.Socket[bytes]]) -> KVTransferService:
    """Return the K/V transfers of a worker that receives no K/V command."""
    shape = Shape()
    return KVTransferService(WorkerConfig(model=""), context, shape.cache(), shape.layout)


@dataclass
class Worker:
    """A cache, checkpoints beside it if the shape has any, and their transfers, in this
    process."""

    context: zmq.Context[zmq.Socket[bytes]]
    shape: Shape
    config: WorkerConfig
    cache: KVCache = field(init=False)
    states: CheckpointMemory | None = field(init=False)
    transfers: KVTransferService = field(init=False)
    results: dict[int, KVFetched | KVFailure] = field(default_factory=dict)
    taken: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        exports = self.config.kv_export and self.config.kv_mover in ("auto", "shm")
        num_bytes = self.shape.num_blocks * self.shape.block_bytes
        shared = SharedMemory(num_bytes) if exports else None
        self.cache = self.shape.cache(shared)
        self.states = self.shape.states(is_shared=exports)
        self.transfers = KVTransferService(
            self.config, self.context, self.cache, self.shape.layout, self.states
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.transfers.__exit__()

    def fetch(
        self,
        job: int,
        source: PeerSource,
        blocks: list[int],
        timeout_s: float = 10,
        checkpoint: int | None = None,
    ) -> None:
        message = KVFetch(
            job=job,
            source=source,
            blocks=Int32.of(blocks),
            timeout_s=timeout_s,
            checkpoint=checkpoint,
        )
        self.transfers.apply(message)

    def receive(self, timeout_s: float = WAIT_S) -> KVReport | None:
        """Return the next report and store its results; None if no report comes in time."""
        poller = zmq.Poller()
        poller.register(self.transfers.fd, zmq.POLLIN)
        give_up = monotonic() + timeout_s
        while (report := self.transfers.report()) is None:
            if not poller.poll(max(0, int((give_up - monotonic()) * 1000))):
                return None
        results: list[KVFetched | KVFailure] = [*report.fetched, *report.failed]
        for result in results:
            assert result.job not in self.results, "a job has one result"
            self.results[result.job] = result
        self.taken += report.taken
        return report

    def result_of(self, job: int, timeout_s: float = WAIT_S) -> KVFetched | KVFailure:
        give_up = monotonic() + timeout_s
        while job not in self.results:
            assert self.receive(give_up - monotonic()) is not None, f"no result of job {job}"
        return self.results[job]

    def failure_of(self, job: int, timeout_s: float = WAIT_S) -> KVFailure:
        result = self.result_of(job, timeout_s)
        assert isinstance(result, KVFailure)
        return result

    def receives_nothing(self, for_s: float = 0.1) -> bool:
        return self.receive(for_s) is None


class Peer:
    """Another process with a cache, which it exports. It is killed when the `with` block is
    left."""

    def __init__(self, shape: Shape, address: str, mover: Any = "auto", **more: Any) -> None:
        config = WorkerConfig(model="", kv_export=True, kv_address=address, kv_mover=mover, **more)
        text = msgspec.json.encode((shape, config)).decode()
        self.address = address
        self.program = Program(
            ["-c", START, text],
            environment={"OMP_NUM_THREADS": "1"},
            has_stdin=True,
        )

    def __enter__(self) -> Self:
        self.program.line_with("ready")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.program.__exit__(None, None, None)

    @property
    def pid(self) -> int:
        return self.program.process.pid

    def export(
        self, lease: bytes, blocks: list[int], readers: int = 1, checkpoint: int = 0
    ) -> None:
        """Export blocks, and the state in `checkpoint`; 0: none."""
        self._send(f"export {lease.hex()} {','.join(map(str, blocks))} {readers} {checkpoint}")

    def withdraw(self, lease: bytes) -> None:
        self._send(f"withdraw {lease.hex()}")

    def fill(self, value: int) -> None:
        """Fill every byte of the cache and of the checkpoints with `value`, as if they were
        reused."""
        self._send(f"fill {value}")

    def num_dropped(self) -> int:
        """Return the number of invalid messages so far plus the number of unread answers."""
        self._send("dropped")
        (*_, last) = [line for line in self.program.out if line.startswith("dropped")]
        return int(last.split()[1])

    def resident_bytes(self) -> int:
        """Return the resident memory of the process, without shared memory."""
        status = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        (line,) = [line for line in status if line.startswith("RssAnon")]
        return int(line.split()[1]) * 1024

    def source(self, lease: bytes, first: int = 0) -> PeerSource:
        return PeerSource(address=self.address, lease=lease, first=first)

    def _send(self, line: str) -> None:
        """Send a line, and wait until the process has executed it."""
        count = sum(text.startswith("done") for text in self.program.out)
        self.program.send_line(line)
        self.program.line_with(f"done {count + 1}")


def main(text: str) -> None:
    shape, config = msgspec.json.decode(text, type=tuple[Shape, WorkerConfig])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Worker(context, shape, config) as worker:
        serve(worker)
    context.term()


def serve(worker: Worker) -> None:
    """Execute the commands on stdin, one per line, until stdin ends. Print a line after each
    command, and for each lease that was taken."""
    poller = zmq.Poller()
    poller.register(sys.stdin, zmq.POLLIN)
    poller.register(worker.transfers.fd, zmq.POLLIN)
    print("ready", os.getpid(), flush=True)
    num_done = 0
    while True:
        ready = dict(poller.poll())
        if worker.transfers.fd in ready and (report := worker.transfers.report()) is not None:
            for lease in report.taken:
                print("taken", lease.hex(), flush=True)
        if sys.stdin.fileno() in ready:
            if not (line := sys.stdin.readline()):
                return
            execute(worker, *line.split())
            num_done += 1
            print("done", num_done, flush=True)


def execute(worker: Worker, command: str, *words: str) -> None:
    match command:
        case "export":
            lease, blocks, readers, checkpoint = words
            message = KVExport(
                lease=bytes.fromhex(lease),
                blocks=Int32.of(map(int, blocks.split(","))),
                readers=int(readers),
                checkpoint=int(checkpoint) or None,
            )
            worker.transfers.apply(message)
        case "withdraw":
            worker.transfers.apply(KVWithdraw(lease=bytes.fromhex(words[0])))
        case "dropped":
            print("dropped", worker.transfers.num_dropped, flush=True)
        case "fill":
            worker.cache.rows.fill_(int(words[0]))
            if worker.states is not None:
                worker.states.rows.fill_(int(words[0]))
        case _:
            raise ValueError(f"unknown command {command}")
