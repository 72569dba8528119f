"""Sends malformed messages to the sockets of a worker."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import zmq

from protocol.config.worker import WorkerConfig
from protocol.wire import codec, sockets
from protocol.worker import kv_peers, steps
from protocol.worker.kv import KVFetched, PeerSource
from protocol.worker.steps import TokenizerRead, Trace, WorkerFailed, WorkerReady
from tests.support.kv_worker import Peer, Shape, Worker
from tests.support.processes import Program
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.waiting import eventually
from tests.torture.fuzz.frames import BATCH, Nonsense, batches
from tests.torture.fuzz.outcome import PATIENCE_S, Outcome, watched

SHAPE = Shape(seed=5)
LEASE, OTHER_LEASE = b"l" * 16, b"the lease of others"


def kv_server(count: int, seed: int) -> Outcome:
    """Send malformed messages to a worker as a peer that reads its K/V. It must drop all malformed
    ones, must not grow, and must still send correct K/V to another worker afterwards."""
    outcome = Outcome("worker, from readers")
    with _kv_address() as (context, address), Peer(SHAPE, address, "zmq") as peer:
        peer.export(LEASE, [1, 2, 3, 4, 5, 6, 7, 8], readers=1000)
        peer.export(OTHER_LEASE, [9, 10])
        socket = sockets.connect_dealer(context, address)
        with watched(outcome, lambda: peer.pid) as is_warm:
            nonsense = Nonsense(kv_peers.FromReader, Random(seed))
            for number, batch in enumerate(batches(nonsense, count, outcome)):
                for frames in batch:
                    socket.send_multipart(frames)
                    while socket.poll(0):
                        socket.recv_multipart()
                if number == count // BATCH // 10:
                    is_warm()
            assert eventually(lambda: peer.num_dropped() >= outcome.malformed, within_s=PATIENCE_S)
        outcome.counted = peer.num_dropped()
        with Worker(context, Shape(), WorkerConfig(model="", kv_mover="zmq")) as worker:
            worker.fetch(1, peer.source(OTHER_LEASE), [3, 4])
            assert isinstance(worker.result_of(1), KVFetched)
            whole = SHAPE.cache().rows
            assert worker.cache.rows[:, 3:5].equal(whole[:, 9:11])
    return outcome


def kv_reader(count: int, seed: int) -> Outcome:
    """Send malformed messages to a worker as the peer whose K/V it reads. Every transfer must
    fail."""
    outcome = Outcome("worker, from its source")
    with _kv_address() as (context, address):
        router = sockets.bind_router(context, address)
        stop = threading.Event()
        source = PeerSource(address=address, lease=LEASE, first=0)
        nonsense = Nonsense(kv_peers.FromExporter, Random(seed))
        sender = threading.Thread(target=_send_nonsense, args=(router, nonsense, outcome, stop))
        sender.start()
        try:
            with Worker(context, Shape(), WorkerConfig(model="", kv_mover="auto")) as worker:
                job = 0
                while outcome.sent < count:
                    job += 1
                    worker.fetch(job, source, [1, 2], timeout_s=0.5)
                    end = worker.result_of(job, PATIENCE_S)
                    assert not isinstance(end, KVFetched)
                    outcome.notes[end.kind] += 1
                    outcome.counted += 1
        finally:
            stop.set()
            sender.join()
    return outcome


def _send_nonsense(
    router: zmq.Socket[bytes], nonsense: Nonsense, outcome: Outcome, stop: threading.Event
) -> None:
    """Answer each message with up to three changed ones, until `stop` is set."""
    drawn = iter(nonsense)
    while not stop.is_set():
        if not router.poll(20):
            continue
        reader, *_ = router.recv_multipart()
        for frames, message in islice(drawn, 3):
            outcome.sent += 1
            outcome.malformed += message is None
            try:
                router.send_multipart([reader, *frames])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                break  # the reader has disconnected


@contextmanager
def _kv_address() -> Iterator[tuple[zmq.Context[zmq.Socket[bytes]], str]]:
    """Yield a context, whose sockets are closed at the end, and an address for a new socket."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with tempfile.TemporaryDirectory() as folder:
            sockets.make_private(Path(folder) / "run")
            yield context, f"ipc://{folder}/run/kv"
    finally:
        context.destroy(linger=0)


def worker_engine(count: int, seed: int) -> Outcome:
    """Send malformed messages to `count` workers as their engine, one worker after the other. A
    worker trusts its engine: it exits with code 1 and an error at the first malformed message."""
    outcome = Outcome("worker, from its engine")
    drawn = iter(Nonsense(steps.ToWorker, Random(seed), never=(Trace,)))
    with _kv_address() as (context, address):
        model = write_tiny_llama(Path(address.removeprefix("ipc://")).parent)
        router = sockets.bind_router(context, address)
        for _ in range(count):
            config = WorkerConfig(model=str(model), address=address, dtype="float32", threads=1)
            settings = msgspec.json.encode(config).decode()
            with Program(["-P", "-m", "worker", "--config", settings]) as program:
                outcome.notes[_run_worker(router, program, drawn, outcome)] += 1
    return outcome


def _run_worker(router: zmq.Socket[bytes], program: Program, drawn: Any, outcome: Outcome) -> str:
    """Send messages until one is malformed, or until the worker fails or exits. Return how the
    worker ended."""
    decoder: codec.Decoder[steps.FromWorker] = codec.Decoder(steps.FromWorker)
    for expected in (TokenizerRead, WorkerReady):
        assert router.poll(int(PATIENCE_S * 1000)), program.output
        worker, *frames = router.recv_multipart()
        assert isinstance(decoder.decode(frames), expected)
    last: Any = None
    while program.process.poll() is None:
        frames, message = next(drawn)
        outcome.sent += 1
        outcome.malformed += message is None
        try:
            router.send_multipart([worker, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # it has just ended
                raise
        while router.poll(50):
            last = decoder.decode(router.recv_multipart()[1:])
            if isinstance(last, WorkerFailed):
                break
        if isinstance(last, WorkerFailed) or message is None:
            break
    code = program.end(timeout_s=PATIENCE_S)
    assert code in (0, 1), program.output
    outcome.counted += code
    return f"ends with code {code}"
