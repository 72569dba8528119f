"""Workers that only hand over K/V: real caches and real exchanges, in this process and in others.

`python -m tests.support.kv_worker JSON` is one: it fills its cache from a seed, then obeys lines on
its stdin (`Peer` says them) and prints what its exchange reports.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Self

import msgspec
import torch
import zmq

from protocol.arrays import Int32
from protocol.config.worker import WorkerConfig
from protocol.kv import KVExport, KVFailure, KVFetch, KVFetched, KVReport, KVWithdraw, PeerSource
from tests.support.processes import Program
from worker.kv.cache import KVCache, block_bytes
from worker.kv.layout import KVLayout
from worker.kv.transfer.service import KVTransferService
from worker.kv.transfer.shared_memory import SharedMemory

WAIT_S = 20.0


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Of a cache, and what is in it: bytes drawn from `seed`, or zeros."""

    num_layers: int = 2
    num_blocks: int = 17
    block_tokens: int = 4
    num_kv_heads: int = 3
    head_dim: int = 8
    dtype: str = "float32"
    model: str = "5eed"
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
        )

    @property
    def block_bytes(self) -> int:
        dims = self.num_layers, self.block_tokens, self.num_kv_heads, self.head_dim
        return block_bytes(*dims, getattr(torch, self.dtype))

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
            cache.rows.random_(0, 256, generator=torch.Generator().manual_seed(self.seed))
        return cache


def tiny_exchange(context: zmq.Context[zmq.Socket[bytes]]) -> KVTransferService:
    """Of a worker that nobody asks for anything."""
    shape = Shape()
    return KVTransferService(WorkerConfig(model=""), context, shape.cache(), shape.layout)


@dataclass
class Worker:
    """An exchange with a cache, in this process."""

    context: zmq.Context[zmq.Socket[bytes]]
    shape: Shape
    config: WorkerConfig
    cache: KVCache = field(init=False)
    exchange: KVTransferService = field(init=False)
    ends: dict[int, KVFetched | KVFailure] = field(default_factory=dict)
    taken: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        exports = self.config.kv_export and self.config.kv_mover in ("auto", "shm")
        num_bytes = self.shape.num_blocks * self.shape.block_bytes
        shared = SharedMemory(num_bytes) if exports else None
        self.cache = self.shape.cache(shared)
        self.exchange = KVTransferService(self.config, self.context, self.cache, self.shape.layout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.exchange.__exit__()

    def fetch(self, job: int, source: PeerSource, blocks: list[int], timeout_s: float = 10) -> None:
        message = KVFetch(job=job, source=source, blocks=Int32.of(blocks), timeout_s=timeout_s)
        self.exchange.apply(message)

    def hear(self, timeout_s: float = WAIT_S) -> KVReport | None:
        """The next news; None if there is none in time."""
        poller = zmq.Poller()
        poller.register(self.exchange.fd, zmq.POLLIN)
        give_up = monotonic() + timeout_s
        while (report := self.exchange.report()) is None:
            if not poller.poll(max(0, int((give_up - monotonic()) * 1000))):
                return None
        ends: list[KVFetched | KVFailure] = [*report.fetched, *report.failed]
        for end in ends:
            assert end.job not in self.ends, "a job has one end"
            self.ends[end.job] = end
        self.taken += report.taken
        return report

    def end_of(self, job: int, timeout_s: float = WAIT_S) -> KVFetched | KVFailure:
        give_up = monotonic() + timeout_s
        while job not in self.ends:
            assert self.hear(give_up - monotonic()) is not None, f"no end of job {job}"
        return self.ends[job]

    def failure_of(self, job: int, timeout_s: float = WAIT_S) -> KVFailure:
        end = self.end_of(job, timeout_s)
        assert isinstance(end, KVFailure)
        return end

    def hears_nothing(self, for_s: float = 0.1) -> bool:
        return self.hear(for_s) is None


class Peer:
    """Another process with a cache, which exports. Killed at the end of its `with`."""

    def __init__(self, shape: Shape, address: str, mover: Any = "auto", **more: Any) -> None:
        config = WorkerConfig(model="", kv_export=True, kv_address=address, kv_mover=mover, **more)
        text = msgspec.json.encode((shape, config)).decode()
        self.address = address
        self.program = Program(
            ["-m", "tests.support.kv_worker", text],
            environment={"OMP_NUM_THREADS": "1"},
            listens=True,
        )

    def __enter__(self) -> Self:
        self.program.line_with("ready")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.program.__exit__(None, None, None)

    @property
    def pid(self) -> int:
        return self.program.process.pid

    def export(self, lease: bytes, blocks: list[int], readers: int = 1) -> None:
        self._say(f"export {lease.hex()} {','.join(map(str, blocks))} {readers}")

    def withdraw(self, lease: bytes) -> None:
        self._say(f"withdraw {lease.hex()}")

    def fill(self, value: int) -> None:
        """Its blocks are reused: every byte is now `value`."""
        self._say(f"fill {value}")

    def num_dropped(self) -> int:
        """Messages that made no sense to it, so far, and answers that nobody took."""
        self._say("dropped")
        (*_, last) = [line for line in self.program.out if line.startswith("dropped")]
        return int(last.split()[1])

    def resident_bytes(self) -> int:
        """Of its own, without what it shares."""
        status = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        (line,) = [line for line in status if line.startswith("RssAnon")]
        return int(line.split()[1]) * 1024

    def source(self, lease: bytes, first: int = 0) -> PeerSource:
        return PeerSource(address=self.address, lease=lease, first=first)

    def _say(self, line: str) -> None:
        """Done when it has answered."""
        count = sum(said.startswith("done") for said in self.program.out)
        self.program.say(line)
        self.program.line_with(f"done {count + 1}")


def main(text: str) -> None:
    shape, config = msgspec.json.decode(text, type=tuple[Shape, WorkerConfig])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Worker(context, shape, config) as worker:
        obey(worker)
    context.term()


def obey(worker: Worker) -> None:
    """Until stdin ends."""
    poller = zmq.Poller()
    poller.register(sys.stdin, zmq.POLLIN)
    poller.register(worker.exchange.fd, zmq.POLLIN)
    print("ready", os.getpid(), flush=True)
    num_done = 0
    while True:
        ready = dict(poller.poll())
        if worker.exchange.fd in ready and (report := worker.exchange.report()) is not None:
            for lease in report.taken:
                print("taken", lease.hex(), flush=True)
        if sys.stdin.fileno() in ready:
            if not (line := sys.stdin.readline()):
                return
            obey_line(worker, *line.split())
            num_done += 1
            print("done", num_done, flush=True)


def obey_line(worker: Worker, command: str, *words: str) -> None:
    match command:
        case "export":
            lease, blocks, readers = words
            ids = Int32.of(map(int, blocks.split(",")))
            message = KVExport(lease=bytes.fromhex(lease), blocks=ids, readers=int(readers))
            worker.exchange.apply(message)
        case "withdraw":
            worker.exchange.apply(KVWithdraw(lease=bytes.fromhex(words[0])))
        case "dropped":
            print("dropped", worker.exchange.num_dropped, flush=True)
        case "fill":
            worker.cache.rows.fill_(int(words[0]))
        case _:
            raise ValueError(f"what is {command}?")


if __name__ == "__main__":
    main(sys.argv[1])
