"""Requests that are offered whatever becomes of them, by processes of their own.

Who measures how long something takes must not be what takes long: a process that has a thousand
connections open hears late of each. So the many requests of an overload come from one process, and
what refusals take is measured by another, which has little to do and tells how late it was itself.

    python -m tests.support.offered PORT PER_S BEGIN UNTIL SEED      -> `Offered`, as JSON

Times are of time.monotonic, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

NAMES = ("alice", "bob")
PROMPT, ANSWER = 64, 16
REFUSED = 429


def key_of(name: str) -> str:
    return f"tg-{name:x<43}"


@dataclass
class Told:
    """One request. `sent_at`: before it connects; `tokens`: of prompt and answer, if that is whole;
    `error`: of the connection."""

    sent_at: float
    status: int = 0
    status_at: float = 0.0
    retry_after: str = ""
    first_at: float = 0.0
    ended_at: float = 0.0
    tokens: int = 0
    error: str = ""


class Client:
    """Requests to the token endpoint over connections of their own. No two prompts begin alike."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self._port = port
        self._random = random.Random(seed)

    async def ask(self, name: str, prompt: int, answer: int, *, stream: bool = False) -> Told:
        ids = [10 + self._random.randrange(40_000) for _ in range(prompt)]
        sampling = {"max_tokens": answer, "ignore_eos": True, "temperature": 0}
        body = json.dumps({"token_ids": ids, "sampling_params": sampling, "stream": stream})
        head = (
            "POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Authorization: Bearer {key_of(name)}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        told = Told(time.monotonic())
        try:
            await self._exchange((head + body).encode(), told)
        except (OSError, asyncio.IncompleteReadError) as error:
            told.error = repr(error)
        told.ended_at = time.monotonic()
        told.tokens = prompt + answer if told.status == 200 and not told.error else 0
        return told

    async def _exchange(self, request: bytes, told: Told) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(request)
            told.status = int((await reader.readuntil(b"\r\n")).split()[1])
            told.status_at = time.monotonic()
            headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            told.retry_after = next(
                (line[13:] for line in headers.splitlines() if line.startswith("retry-after: ")), ""
            )
            if await reader.read(1):
                told.first_at = time.monotonic()
            await reader.read()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def closed_loop(ask: Callable[[], Awaitable[Told]], streams: int, until: float) -> list[Told]:
    """So many at once, each asking anew when it was answered; who is refused comes back soon."""
    told: list[Told] = []

    async def one() -> None:
        while time.monotonic() < until:
            told.append(await ask())
            if told[-1].status != 200:
                await asyncio.sleep(0.25)

    await asyncio.gather(*(one() for _ in range(streams)))
    return told


async def open_loop(
    ask: Callable[[], Awaitable[Told]], per_s: float, begin: float, until: float
) -> list[Told]:
    """So many per second, whatever becomes of them."""
    tasks: list[asyncio.Task[Told]] = []
    due = begin
    while due < until:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.ensure_future(ask()))
        due += 1 / per_s
    return list(await asyncio.gather(*tasks))


async def lateness(begin: float, until: float) -> list[float]:
    """By how many seconds this process itself is late when it wants to do something."""
    late: list[float] = []
    await asyncio.sleep(begin - time.monotonic())
    while (before := time.monotonic()) < until:
        await asyncio.sleep(0.01)
        late.append(time.monotonic() - before - 0.01)
    return late


@dataclass
class Offered:
    """late   of the process that offered, as `lateness` says"""

    told: list[Told]
    late: list[float]


async def offer(port: int, per_s: float, begin: float, until: float, seed: int) -> Offered:
    client, names = Client(port, seed), itertools.cycle(NAMES)

    def ask() -> Awaitable[Told]:
        return client.ask(next(names), PROMPT, ANSWER)

    told, late = await asyncio.gather(open_loop(ask, per_s, begin, until), lateness(begin, until))
    return Offered(told, late)


async def offered_elsewhere(
    port: int, per_s: float, begin: float, until: float, seed: int
) -> Offered:
    """By another process. Raises RuntimeError if that fails."""
    words = [str(word) for word in (port, per_s, begin, until, seed)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.offered", *words, stdout=asyncio.subprocess.PIPE
    )
    told, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the process that offers ended with {process.returncode}")
    return msgspec.json.decode(told, type=Offered)


def main() -> None:
    port, per_s, begin, until, seed = sys.argv[1:]
    offered = asyncio.run(offer(int(port), float(per_s), float(begin), float(until), int(seed)))
    sys.stdout.buffer.write(msgspec.json.encode(offered))


if __name__ == "__main__":
    main()
