"""Open-loop load: sends requests at a fixed rate from a process of its own.

The load generator must not share a process with the code that it measures. This program does
nothing else, with as little work as possible, and reports how late it sent each request.

    python -m tests.benchmarks.offered PORT PER_S BEGIN UNTIL PROMPT ANSWER SEED

Prints an `Offered` as JSON. BEGIN and UNTIL are times of time.monotonic, which all processes of a
machine share.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import selectors
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

NAMES = ("alice", "bob")
REFUSED = 429


def key_of(name: str) -> str:
    return f"tg-{name:x<43}"


@dataclass(frozen=True)
class OfferedLoad:
    """The numbers of tokens in each request's prompt and answer."""

    prompt: int
    answer: int


@dataclass
class OfferedResult:
    """The result of one request.

    sent_at   time just before the connection is opened
    tokens    tokens of prompt and answer; 0 unless the answer is complete
    error     error of the connection; "" if there was none
    """

    sent_at: float
    status: int = 0
    status_at: float = 0.0
    retry_after: str = ""
    first_at: float = 0.0
    ended_at: float = 0.0
    tokens: int = 0
    error: str = ""


def request_of(draw: random.Random, name: str, prompt: int, answer: int) -> bytes:
    """Return a request to /inference/v1/generate. Its prompt is random, so the prefix cache has no
    effect."""
    ids = [10 + draw.randrange(40_000) for _ in range(prompt)]
    sampling = {"max_tokens": answer, "ignore_eos": True, "temperature": 0}
    body = json.dumps({"token_ids": ids, "sampling_params": sampling})
    head = (
        "POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Authorization: Bearer {key_of(name)}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


class OfferedClient:
    """A client that opens a new connection for each request."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self._port = port
        self._random = random.Random(seed)

    async def ask(self, name: str, prompt: int, answer: int) -> OfferedResult:
        request = request_of(self._random, name, prompt, answer)
        result = OfferedResult(time.monotonic())
        try:
            await self._exchange(request, result)
        except (OSError, asyncio.IncompleteReadError) as error:
            result.error = repr(error)
        result.ended_at = time.monotonic()
        result.tokens = prompt + answer if result.status == 200 and not result.error else 0
        return result

    async def _exchange(self, request: bytes, result: OfferedResult) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(request)
            result.status = int((await reader.readuntil(b"\r\n")).split()[1])
            result.status_at = time.monotonic()
            headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            result.retry_after = next(
                (line[13:] for line in headers.splitlines() if line.startswith("retry-after: ")), ""
            )
            if await reader.read(1):
                result.first_at = time.monotonic()
            await reader.read()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def closed_loop(
    ask: Callable[[], Awaitable[OfferedResult]], streams: int, until: float
) -> list[OfferedResult]:
    """Keep `streams` requests open until the time `until`. After any status but 200, wait 0.25 s
    before the next request."""
    result: list[OfferedResult] = []

    async def one() -> None:
        while time.monotonic() < until:
            result.append(await ask())
            if result[-1].status != 200:
                await asyncio.sleep(0.25)

    await asyncio.gather(*(one() for _ in range(streams)))
    return result


class OfferedCrowd:
    """Sends many requests, each over a connection of its own. It uses as little CPU time as
    possible, because it shares the machine with the server that is measured."""

    def __init__(self, port: int) -> None:
        self.results: list[OfferedResult] = []
        self._address = ("127.0.0.1", port)
        self._selector = selectors.DefaultSelector()

    @property
    def num_open(self) -> int:
        return len(self._selector.get_map())

    def send(self, request: bytes, tokens: int) -> None:
        """Send a request over a new connection. `tokens` is the length of its prompt and answer."""
        result = OfferedResult(time.monotonic(), tokens=tokens)
        self.results.append(result)
        try:
            sock = socket.create_connection(self._address, timeout=1.0)
            sock.sendall(request)
        except OSError as error:
            self._fail(result, error)
            return
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, (result, bytearray()))

    def run(self, until: float) -> None:
        """Receive answers until the time `until` (time.monotonic)."""
        while (left_s := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                self._read(key)
            if not self.num_open:
                time.sleep(max(0.0, until - time.monotonic()))

    def _read(self, key: selectors.SelectorKey) -> None:
        result, got = key.data
        sock = key.fileobj
        assert isinstance(sock, socket.socket)
        try:
            data = sock.recv(1 << 16)
        except OSError as error:
            self._fail(result, error)
            data = b""
        if data:
            if not got:
                result.status_at = time.monotonic()
            got += data
            return
        self._selector.unregister(sock)
        sock.close()
        result.ended_at = time.monotonic()
        if not result.error:
            _read_answer(bytes(got), result)

    def _fail(self, result: OfferedResult, error: OSError) -> None:
        result.error, result.tokens, result.ended_at = repr(error), 0, time.monotonic()


def _read_answer(answer: bytes, result: OfferedResult) -> None:
    """Parse a complete HTTP response, and record its outcome in `result`."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    if not body:
        result.error, result.tokens = f"no answer: {lines[0]!r}", 0
        return
    result.status = int(lines[0].split()[1])
    result.tokens = result.tokens if result.status == 200 else 0
    fields = dict(line.lower().split(": ", 1) for line in lines[1:])
    result.retry_after = fields.get("retry-after", "")


@dataclass
class Offered:
    """The results of an offered load.

    late    seconds by which each request was sent late
    cpu_s   CPU time that the load generator used
    """

    results: list[OfferedResult]
    late: list[float]
    cpu_s: float


def offer(
    port: int, per_s: float, begin: float, until: float, load: OfferedLoad, seed: int
) -> Offered:
    """Send requests at a fixed rate, whether or not earlier ones have ended. Return when all have
    ended."""
    draw, names, crowd = random.Random(seed), itertools.cycle(NAMES), OfferedCrowd(port)
    dues = [begin + place / per_s for place in range(int((until - begin) * per_s))]
    requests = [request_of(draw, next(names), load.prompt, load.answer) for _ in dues]
    before, late = time.process_time(), []
    for due, request in zip(dues, requests, strict=True):
        crowd.run(due)
        late.append(time.monotonic() - due)
        crowd.send(request, load.prompt + load.answer)
    while crowd.num_open:
        crowd.run(time.monotonic() + 0.1)
    return Offered(crowd.results, late, time.process_time() - before)


async def offered_elsewhere(
    port: int, per_s: float, begin: float, until: float, load: OfferedLoad, seed: int
) -> Offered:
    """Offer a load from another process. Raises RuntimeError if that fails."""
    words = [str(word) for word in (port, per_s, begin, until, load.prompt, load.answer, seed)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.benchmarks.offered", *words, stdout=asyncio.subprocess.PIPE
    )
    result, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the process that offers ended with {process.returncode}")
    return msgspec.json.decode(result, type=Offered)


def main() -> None:
    port, per_s, begin, until, prompt, answer, seed = sys.argv[1:]
    load = OfferedLoad(int(prompt), int(answer))
    offered = offer(int(port), float(per_s), float(begin), float(until), load, int(seed))
    sys.stdout.buffer.write(msgspec.json.encode(offered))


if __name__ == "__main__":
    main()
