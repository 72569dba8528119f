"""Ten times more than a server can do, and one key that asks for all of it.

A measurement, not a test: `python -m tests.support.overload` starts `tidegate serve` with the
default model and two keys, finds what it can do at most (a closed loop), offers ten times as many
requests per second for a minute, and then lets one key flood it with long prompts while another
asks now and then. Told are: how long refusals take, what is done beside what can be done, memory,
and the other key's time to its first token, alone and beside the flood, in turns.

On a machine that others use, times say little; so the same is told in tokens that the engine
computed between a request and its first token, which depends on nobody. `--seconds`, `--times N`:
shorter or surer. The laws themselves are tests/unit/test_overload.py.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import psutil

from protocol.api_keys import KeyEntry, digest_of
from tests.support.engine_view import EngineView
from tests.support.server import Server
from tools.keys import with_key, write

NAMES = ("alice", "bob")
FACTOR = 10
PROMPT, ANSWER = 64, 16
FLOOD_PROMPT, FLOOD_ANSWER, FLOOD_STREAMS = 1500, 32, 48
LENGTHS = (32, 256, 1024)
REFUSED = 429
MIB = 1 << 20
OPTIONS = ["--max-slots", "16", "--max-waiting", "64", "--max-len", "2048", "--poison-slots", "off"]


def key_of(name: str) -> str:
    return f"tg-{name:x<43}"


@dataclass
class Told:
    """One request, on time.monotonic's clock. `tokens`: of prompt and answer, if that is whole."""

    sent_at: float
    status: int = 0
    status_at: float = 0.0
    retry_after: str = ""
    first_at: float = 0.0
    ended_at: float = 0.0
    tokens: int = 0


class Client:
    """Requests to the token endpoint over connections of their own. No two prompts begin alike."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._random = random.Random(0)
        self._numbers = itertools.count()

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
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write((head + body).encode())
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
        told.ended_at = time.monotonic()
        told.tokens = prompt + answer if told.status == 200 else 0
        return told


async def closed_loop(ask: Callable[[], Awaitable[Told]], streams: int, until: float) -> list[Told]:
    """So many at once, each asking anew when it was answered; who is refused comes back soon."""
    told: list[Told] = []

    async def one() -> None:
        while time.monotonic() < until:
            told.append(await ask())
            if told[-1].status == REFUSED:
                await asyncio.sleep(0.25)

    await asyncio.gather(*(one() for _ in range(streams)))
    return told


async def open_loop(ask: Callable[[], Awaitable[Told]], per_s: float, until: float) -> list[Told]:
    """So many per second, whatever becomes of them."""
    tasks: list[asyncio.Task[Told]] = []
    due = time.monotonic()
    while due < until:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.ensure_future(ask()))
        due += 1 / per_s
    return list(await asyncio.gather(*tasks))


async def lateness(until: float) -> list[float]:
    """By how many seconds this process itself is late when it wants to do something."""
    late = []
    while (before := time.monotonic()) < until:
        await asyncio.sleep(0.01)
        late.append(time.monotonic() - before - 0.01)
    return late


@dataclass(frozen=True)
class Process:
    name: str
    process: psutil.Process

    @property
    def rss(self) -> int:
        return int(self.process.memory_info().rss)


def processes_of(server: Server) -> list[Process]:
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [
        Process(_name(child), child) for child in found if "resource_tracker" not in _name(child)
    ]


def _name(process: psutil.Process) -> str:
    words = [word for word in process.cmdline() if not word.startswith("-")]
    return next((Path(w).name for w in words[1:] if "python" not in w), process.name())[:24]


def done_per_s(told: Sequence[Told], begun: float, until: float) -> tuple[float, float]:
    """(tokens, requests) per second, of those that came to their end in that time."""
    done = [one for one in told if one.tokens and begun <= one.ended_at <= until]
    seconds = until - begun
    return sum(one.tokens for one in done) / seconds, len(done) / seconds


def spread(seconds: Sequence[float]) -> str:
    cuts = quantiles((second * 1e3 for second in seconds), n=100)
    return f"p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms, most {max(seconds) * 1e3:.1f} ms"


async def overload(server: Server, seconds: float) -> None:
    client, names = Client(server.port), itertools.cycle(NAMES)

    def ask() -> Awaitable[Told]:
        return client.ask(next(names), PROMPT, ANSWER)

    await closed_loop(ask, 16, time.monotonic() + seconds / 12)  # to warm up
    begun = time.monotonic()
    until = begun + seconds / 3
    peak, requests_per_s = done_per_s(await closed_loop(ask, 48, until), begun, until)
    print(
        f"at most        {peak:.0f} tokens/s, {requests_per_s:.1f} requests/s (closed loop of 48)"
    )
    processes = processes_of(server)
    before = [process.rss for process in processes]
    begun = time.monotonic()
    until = begun + seconds
    late = asyncio.ensure_future(lateness(until))
    told = await open_loop(ask, FACTOR * requests_per_s, until)
    goodput, _ = done_per_s(told, begun, until)
    refused = [one for one in told if one.status == REFUSED]
    others = {one.status for one in told} - {200, REFUSED}
    waits = [float(one.retry_after) for one in refused if one.retry_after]
    print(f"offered        {len(told) / seconds:.0f} requests/s for {seconds:.0f} s")
    print(f"done           {goodput:.0f} tokens/s, {goodput / peak:.2f} of the most")
    print(f"refused        {len(refused)} of {len(told)}; any other status: {others or 'none'}")
    print(f"  told after   {spread([one.status_at - one.sent_at for one in refused])}")
    print(f"  our lateness {spread(late.result())} (of the process that measures)")
    print(f"  Retry-After  on {len(waits)} of them, {min(waits):.0f} to {max(waits):.0f} s")
    for process, rss in zip(processes, before, strict=True):
        print(f"memory         {process.name:24} {rss / MIB:.0f} -> {process.rss / MIB:.0f} MiB")


async def first_token(client: Client, view: EngineView, length: int) -> tuple[float, int]:
    """(seconds, tokens that the engine computed meanwhile), until Bob's first token."""
    before = view.stats().num_computed_tokens
    told = await client.ask("bob", length, 1)
    assert told.status == 200, f"refused: {told.status}"
    return told.first_at - told.sent_at, view.stats().num_computed_tokens - before


async def flood(server: Server, times: int) -> None:
    """Bob alone and beside the flood, in turns."""
    client, view = Client(server.port), EngineView(server.address)
    alone: dict[int, list[tuple[float, int]]] = {length: [] for length in LENGTHS}
    beside: dict[int, list[tuple[float, int]]] = {length: [] for length in LENGTHS}
    for _ in range(times):
        for length in LENGTHS:
            alone[length].append(await first_token(client, view, length))
        flooding = asyncio.ensure_future(_flood(client))
        await asyncio.sleep(4.0)
        for length in LENGTHS:
            beside[length].append(await first_token(client, view, length))
            await asyncio.sleep(1.0)
        flooding.cancel()
        with suppress(asyncio.CancelledError):
            await flooding
        await asyncio.to_thread(view.wait_until_free, 120.0)
    view.close()
    print(f"\nwhile {FLOOD_STREAMS} requests of {FLOOD_PROMPT} tokens are open of another key")
    for length in LENGTHS:
        before, after = alone[length], beside[length]
        solo_s, flood_s = (median(s for s, _ in pairs) for pairs in (before, after))
        solo, flooded = (median(count for _, count in pairs) for pairs in (before, after))
        print(
            f"prompt of {length:5}  {solo_s * 1e3:6.0f} -> {flood_s * 1e3:6.0f} ms, "
            f"{flood_s / solo_s:.2f} times; computed until then "
            f"{solo:.0f} -> {flooded:.0f} tokens, {flooded / solo:.2f} times"
        )


async def _flood(client: Client) -> list[Told]:
    def ask() -> Awaitable[Told]:
        return client.ask("alice", FLOOD_PROMPT, FLOOD_ANSWER)

    return await closed_loop(ask, FLOOD_STREAMS, time.monotonic() + 3600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("options", nargs="*", help="of tidegate serve, after --")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys, text = Path(folder) / "keys.toml", ""
        for name in NAMES:
            text = with_key(text, name, KeyEntry(digest=digest_of(key_of(name))))
        write(keys, text)
        with Server(*OPTIONS, "--api-keys", str(keys), *wanted.options) as server:
            asyncio.run(overload(server, wanted.seconds))
            asyncio.run(flood(server, wanted.times))


if __name__ == "__main__":
    main()
