"""Runs the parts of a cluster in several processes, which are forked and talk over pipes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

from simulator.cluster import PartPeers, PartTotals, SentRequest, WindowReport

T = TypeVar("T")


class ForkedPartPeers:
    """The `PartPeers` of one of several processes, which exchange requests and loads over pipes.

    own       number of this process
    pipes     process -> the pipe to it
    """

    def __init__(self, own: int, pipes: dict[int, Connection]) -> None:
        self._own, self._pipes = own, pipes
        self._requests = msgspec.msgpack.Decoder(list[SentRequest])
        self._reports = msgspec.msgpack.Decoder(WindowReport)

    def exchange_requests(self, outgoing: list[list[SentRequest]]) -> list[SentRequest]:
        encoded = {number: msgspec.msgpack.encode(outgoing[number]) for number in self._pipes}
        received = self._exchange(encoded)
        return [sent for data in received for sent in self._requests.decode(data)]

    def exchange_reports(self, own: WindowReport) -> list[WindowReport]:
        encoded = msgspec.msgpack.encode(own)
        received = self._exchange(dict.fromkeys(self._pipes, encoded))
        return [self._reports.decode(data) for data in received]

    def _exchange(self, outgoing: dict[int, bytes]) -> list[bytes]:
        """Send to and receive from each peer. Of two processes the one with the smaller number
        sends first, so that never both wait for the other to read."""
        received = []
        for number, pipe in sorted(self._pipes.items()):
            if self._own < number:
                pipe.send_bytes(outgoing[number])
                received.append(pipe.recv_bytes())
            else:
                received.append(pipe.recv_bytes())
                pipe.send_bytes(outgoing[number])
        return received


def run_parts(num: int, run: Callable[[int, PartPeers], PartTotals]) -> PartTotals:
    """Run `run(part, peers)` for each part at the same time, the first one in this process, and
    return the sum of their totals. Raises RuntimeError if another process fails."""
    context = multiprocessing.get_context("fork")
    pipes: list[dict[int, Connection]] = [{} for _ in range(num)]
    for i in range(num):
        for j in range(i + 1, num):
            pipes[i][j], pipes[j][i] = multiprocessing.Pipe()
    results: list[tuple[Connection, Connection]] = [multiprocessing.Pipe() for _ in range(num)]

    def run_child(part: int) -> None:
        totals = run(part, ForkedPartPeers(part, pipes[part]))
        results[part][1].send_bytes(msgspec.msgpack.encode(totals))

    children = [context.Process(target=run_child, args=(part,)) for part in range(1, num)]
    for child in children:
        child.start()
    totals = run(0, ForkedPartPeers(0, pipes[0]))
    for part, child in enumerate(children, start=1):
        data = _receive(results[part][0], child.sentinel)
        child.join()
        if data is None:
            raise RuntimeError(f"process {part} of the simulation failed")
        totals.merge(msgspec.msgpack.decode(data, type=PartTotals))
    return totals


def _receive(pipe: Connection, sentinel: int) -> bytes | None:
    """Return what a child sends; None if it ends without sending anything."""
    ready: Sequence[object] = multiprocessing.connection.wait([pipe, sentinel])
    return pipe.recv_bytes() if pipe in ready else None
