"""Offers a server ten times its capacity, and lets one key flood it.

This is a measurement, not a test. `python -m tests.benchmarks.overload` starts `tidegate serve`
with the default model and two keys, and measures its capacity in a closed loop. For a minute it
offers ten times as many requests per second. Then one key sends a flood of long prompts while
another sends a request now and then. Printed are:

- the time of refusals;
- the throughput, compared with the capacity;
- memory during the overload;
- the other key's time to first token, alone and during the flood, in turns.

Promises that do not hold are listed at the end, and the exit code is 1.

The load comes from a process of its own (offered.py). Times say little on a machine with other
work, so the flood is also measured in tokens that the engine computed between a request and its
first token. `--seconds` shortens the run, and `--times N` repeats it. tests/unit/test_overload.py
tests the same promises without a clock.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import psutil

from protocol.shared.api_keys import KeyEntry, digest_of
from tests.benchmarks.offered import (
    NAMES,
    REFUSED,
    Offered,
    OfferedClient,
    OfferedLoad,
    OfferedResult,
    closed_loop,
    key_of,
    offered_elsewhere,
)
from tests.support.engine_view import EngineView
from tests.support.server import Server
from tools.commands.keys import with_key, write

FACTOR = 10
USUAL, SMALL = OfferedLoad(256, 128), OfferedLoad(64, 16)
"""USUAL is a usual request. SMALL is so small that refusing nine of ten requests is a large part of
the server's work."""
STREAMS = 48
CLOSED = f"a closed loop of {STREAMS}"
START_S = 4.0
"""Time for the load generator to start."""
FLOOD_PROMPT, FLOOD_ANSWER, FLOOD_STREAMS = 1500, 32, 48
LENGTHS = (8, 16, 32, 64, 256, 1024)
MIB = 1 << 20
OPTIONS = ["--max-slots", "16", "--max-waiting", "64", "--max-len", "2048", "--poison-slots", "off"]

MOST_REFUSAL_S = 0.05
LEAST_GOODPUT = 0.9
MOST_TIMES = 2.0
FLAT, FLAT_BYTES = 0.03, 8 * MIB
"""Memory may grow by the larger of this share and these bytes, between the second and the last
quarter of the overload."""


@dataclass
class Promises:
    """Collects the promises that a server did not keep."""

    broken: list[str] = field(default_factory=list)

    def expect(self, holds: bool, promise: str) -> None:
        if not holds:
            self.broken.append(promise)


@dataclass(frozen=True)
class OverloadProcess:
    name: str
    process: psutil.Process

    @property
    def rss(self) -> int:
        return int(self.process.memory_info().rss)

    @property
    def cpu_s(self) -> float:
        return float(sum(self.process.cpu_times()[:2]))


def processes_of(server: Server) -> list[OverloadProcess]:
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [
        OverloadProcess(_name(child), child)
        for child in found
        if "resource_tracker" not in _name(child)
    ]


def _name(process: psutil.Process) -> str:
    words = [word for word in process.cmdline() if not word.startswith("-")]
    return next((Path(w).name for w in words[1:] if "python" not in w), process.name())[:24]


def done_per_s(result: Sequence[OfferedResult], begun: float, until: float) -> tuple[float, float]:
    """Return (tokens, requests) per second of the requests that finished between the times `begun`
    and `until`."""
    done = [one for one in result if one.tokens and begun <= one.ended_at <= until]
    seconds = until - begun
    return sum(one.tokens for one in done) / seconds, len(done) / seconds


def spread(seconds: Sequence[float]) -> str:
    cuts = quantiles((second * 1e3 for second in seconds), n=100)
    return f"p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms, most {max(seconds) * 1e3:.1f} ms"


async def overload(server: Server, load: OfferedLoad, seconds: float, promises: Promises) -> None:
    """Offer FACTOR times the capacity. The capacity is measured before and after."""
    print(f"\nprompts of {load.prompt} tokens, answers of {load.answer}")
    peaks = [await capacity(server, load, seconds)]
    before, requests_per_s = peaks[0]
    print(f"capacity       {before:.0f} tokens/s, {requests_per_s:.1f} requests/s ({CLOSED})")
    begin = time.monotonic() + START_S
    until = begin + seconds / 6 + seconds
    offered, seen = await asyncio.gather(
        offered_elsewhere(server.port, FACTOR * requests_per_s, begin, until, load, seed=1),
        watched(server, until - seconds, until),
    )
    peaks.append(await capacity(server, load, seconds))
    peak = sum(tokens for tokens, _ in peaks) / len(peaks)
    goodput, _ = done_per_s(offered.results, until - seconds, until)
    per_s = len(offered.results) / (until - begin)
    print(f"offered        {per_s:.1f} requests/s for {until - begin:.0f} s")
    print(f"done           {goodput:.0f} tokens/s, {goodput / peak:.2f} of the capacity")
    print(f"capacity after {peaks[1][0]:.0f} tokens/s")
    promise = f"goodput is at least {LEAST_GOODPUT} of the capacity, with prompts of {load.prompt}"
    promises.expect(goodput >= LEAST_GOODPUT * peak, promise)
    report_refusals(offered, promises)
    print(f"load generator {offered.cpu_s / (until - begin):.2f} cores")
    for name, one in seen.items():
        quarter = len(one.sizes) // 4
        early, late = median(one.sizes[quarter : 2 * quarter]), median(one.sizes[3 * quarter :])
        sizes = f"{early / MIB:.1f} -> {late / MIB:.1f} MiB"
        print(f"{name:24} {sizes:>22}, {one.cores:.2f} cores")
        promises.expect(
            late - early <= max(FLAT * early, FLAT_BYTES), f"the memory of {name} is flat"
        )


async def capacity(server: Server, load: OfferedLoad, seconds: float) -> tuple[float, float]:
    """Return the capacity, (tokens, requests) per second, measured in a closed loop. Exit the
    program if no request finishes."""
    client, names = OfferedClient(server.port), itertools.cycle(NAMES)

    def ask() -> Awaitable[OfferedResult]:
        return client.ask(next(names), load.prompt, load.answer)

    begin = time.monotonic() + seconds / 6
    until = begin + seconds
    tokens, requests = done_per_s(await closed_loop(ask, STREAMS, until), begin, until)
    if not requests:
        sys.exit(f"nothing was done within {seconds:.0f} s: more --seconds are needed")
    return tokens, requests


@dataclass
class OverloadWatch:
    """The resident memory of one process, sampled a few times a second, and the number of cores
    that it used on average."""

    sizes: list[int] = field(default_factory=list)
    cores: float = 0.0


async def watched(server: Server, begin: float, until: float) -> dict[str, OverloadWatch]:
    processes = {f"{one.name} {one.process.pid}": one for one in processes_of(server)}
    seen = {name: OverloadWatch() for name in processes}
    await asyncio.sleep(begin - time.monotonic())
    before = {name: one.cpu_s for name, one in processes.items()}
    while time.monotonic() < until:
        for name, one in processes.items():
            seen[name].sizes.append(one.rss)
        await asyncio.sleep(0.25)
    for name, one in processes.items():
        seen[name].cores = (one.cpu_s - before[name]) / (until - begin)
    return seen


def report_refusals(offered: Offered, promises: Promises) -> None:
    result = offered.results
    refused = [one for one in result if one.status == REFUSED]
    others = {one.error or one.status for one in result if one.error or one.status != 200} - {
        REFUSED
    }
    waits = [float(one.retry_after) for one in refused if one.retry_after]
    took = [one.status_at - one.sent_at for one in refused]
    print(f"refused        {len(refused)} of {len(result)}; any other status: {others or 'none'}")
    promises.expect(not others, "nothing but 200 and 429")
    promises.expect(len(waits) == len(refused) > 0, "Retry-After on each refusal")
    if len(took) < 2:
        promises.expect(False, "enough refusals to measure their time")
        return
    print(f"  after        {spread(took)}")
    print(f"  our lateness {spread(offered.late)} (of the process that timed them)")
    print(f"  Retry-After  on {len(waits)} of them, {min(waits):.0f} to {max(waits):.0f} s")
    in_time = quantiles(took, n=100)[98] <= MOST_REFUSAL_S
    promises.expect(in_time, f"99 of 100 refusals within {MOST_REFUSAL_S * 1e3:.0f} ms")


async def first_token(client: OfferedClient, view: EngineView, length: int) -> tuple[float, int]:
    """Return (seconds, tokens that the engine computed) until the first token of a request with the
    key bob."""
    before = view.stats().num_computed_tokens
    result = await client.ask("bob", length, 1)
    assert result.status == 200, f"not answered: {result.status} {result.error}"
    return result.first_at - result.sent_at, view.stats().num_computed_tokens - before


async def flood(server: Server, times: int, promises: Promises) -> None:
    """Measure the time to first token with the key bob, alone and during a flood of the other key,
    in turns."""
    client, view = OfferedClient(server.port), EngineView(server.address)
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
    print(f"\nwhile another key has {FLOOD_STREAMS} open requests of {FLOOD_PROMPT} tokens")
    for length in LENGTHS:
        before, after = alone[length], beside[length]
        solo_s, flood_s = (median(s for s, _ in pairs) for pairs in (before, after))
        solo, flooded = (median(count for _, count in pairs) for pairs in (before, after))
        print(
            f"prompt of {length:5}  {solo_s * 1e3:6.0f} -> {flood_s * 1e3:6.0f} ms, "
            f"{flood_s / solo_s:.2f} times; computed until then "
            f"{solo:.0f} -> {flooded:.0f} tokens, {flooded / solo:.2f} times"
        )
        promise = f"a prompt of {length} waits at most {MOST_TIMES:.0f} times as long beside it"
        promises.expect(flood_s <= MOST_TIMES * solo_s, promise)


async def _flood(client: OfferedClient) -> list[OfferedResult]:
    def ask() -> Awaitable[OfferedResult]:
        return client.ask("alice", FLOOD_PROMPT, FLOOD_ANSWER)

    return await closed_loop(ask, FLOOD_STREAMS, time.monotonic() + 3600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each load")
    parser.add_argument("--times", type=int, default=9, help="number of measurements")
    parser.add_argument("options", nargs="*", help="options for `tidegate serve`, after --")
    wanted, promises = parser.parse_args(), Promises()
    with tempfile.TemporaryDirectory() as folder:
        keys, text = Path(folder) / "keys.toml", ""
        for name in NAMES:
            text = with_key(text, name, KeyEntry(digest=digest_of(key_of(name))))
        write(keys, text)
        with Server(*OPTIONS, "--api-keys", str(keys), *wanted.options) as server:
            for load in (USUAL, SMALL):
                asyncio.run(overload(server, load, wanted.seconds, promises))
            asyncio.run(flood(server, wanted.times, promises))
    for promise in promises.broken:
        print(f"does not hold: {promise}")
    sys.exit(bool(promises.broken))


if __name__ == "__main__":
    main()
