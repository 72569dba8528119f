"""Many clients of a server whose engine is killed again and again. Each request must have exactly
one end, and the gateway must count the same ends as its clients.

    python -m tests.torture.kill_storm [--requests 10000] [--kills 5]

Clients request whole answers and streams, hang up in the middle, send invalid bodies, and abort
their streams, through the API and with `tidegate abort`. The engine is killed each time a share of
all requests has ended; the server runs with --restart. The growth of the gateway process is printed
as a slope. The exit code is 1 if any counts differ, if a request did not have exactly one end, or
if the server did not stop with exit code 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import Any

import requests

from tests.benchmarks.small_requests import FINISHED, LEFT, REFUSED
from tests.support.http import metrics_of
from tests.support.processes import descendants_of
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_roomy_llama
from tests.support.waiting import eventually

CLIENTS = 12
PAUSE_S = 1.0
"""The pause of a client after a failed request: the smallest Retry-After of a 503."""
FAILED, ABORTED = "failed", "aborted"
ABORT = "/inference/v1/abort_requests"
BY_TOOL = 1 / 12
"""The share of aborts by `tidegate abort`. It is small because each starts a process."""
ENDLESS = {"stream": True, "ignore_eos": True, "max_tokens": 10_000}
WAIT_S = 120.0


@dataclass(slots=True)
class Tally:
    """The counts of all clients.

    ends     requests by how they ended
    aborts   answers of the abort route, by status
    wrong    errors of requests that had no end or several
    """

    ends: Counter[str] = field(default_factory=Counter)
    aborts: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, end: str) -> int:
        """Count an end, and return the number of all ends so far."""
        with self.lock:
            self.ends[end] += 1
            return self.ends.total()


def end_of_stream(lines: Iterable[bytes]) -> str:
    """Return how a stream ended: FINISHED, ABORTED or FAILED. Raises ValueError unless it has
    exactly one end and nothing after it."""
    ends: list[str] = []
    for line in filter(None, lines):
        if ends[-1:] == ["[DONE]"]:
            raise ValueError(f"an event after the end: {line!r}")
        data = line.removeprefix(b"data: ")
        if data == b"[DONE]":
            ends.append("[DONE]")
            continue
        event: Mapping[str, Any] = json.loads(data)
        if "error" in event:
            ends.append(FAILED)
        elif reasons := [
            each["finish_reason"] for each in event["choices"] if each["finish_reason"]
        ]:
            ends.append(ABORTED if "abort" in reasons else FINISHED)
    if len(ends) != 2 or ends[1] != "[DONE]":
        raise ValueError(f"a stream that ends with {ends}")
    return ends[0]


@dataclass(frozen=True, slots=True)
class StormClient:
    """One client, which sends requests of random kinds."""

    server: Server
    tally: Tally
    dice: random.Random

    def ask(self) -> str:
        """Send one request, and return its end. Raises ValueError or AssertionError if it has no
        end or several."""
        kinds = ("whole", "stream", "leave", "nonsense", "abort")
        kind = self.dice.choices(kinds, (45, 28, 10, 7, 10))[0]
        prompt = " ".join(
            f"w{self.dice.randrange(3, 90)}" for _ in range(self.dice.randrange(1, 60))
        )
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": self.dice.randrange(1, 24)}
        if kind == "nonsense":
            bad = [{}, {"prompt": 7}, {**body, "max_tokens": -1}, {**body, "n": 10**9}]
            body = self.dice.choice(bad)
        elif kind != "whole":
            body |= {"stream": True} if kind == "stream" else ENDLESS
        url = self.server.url + "/v1/completions"
        with requests.post(url, json=body, stream=True, timeout=60) as response:
            if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
                return FAILED
            if not response.ok:
                return REFUSED
            if kind == "whole":
                assert response.json()["choices"][0]["finish_reason"]
                return FINISHED
            received = response.iter_lines()
            lines = (line for line in received if line and not line.startswith(b":"))
            if kind == "leave":
                next(lines)
                return LEFT
            return self._aborted(lines) if kind == "abort" else end_of_stream(lines)

    def _aborted(self, lines: Iterator[bytes]) -> str:
        """Abort a stream, and return its end. If the abort fails, because the engine is gone or
        restarts, hang up and return LEFT. Raises ValueError if the end contradicts the answer to
        the abort."""
        first = next(lines)
        event = json.loads(first.removeprefix(b"data: "))
        if "error" in event:
            return end_of_stream(chain([first], lines))
        by_tool = self.dice.random() < BY_TOOL
        was_open = (self._by_tool if by_tool else self._by_api)(event["id"])
        if was_open is None:
            return LEFT
        end = end_of_stream(lines)
        # The tool has its own connection: the engine may die before the gateway receives the end.
        if end != (ABORTED if was_open else FAILED) and (end, by_tool) != (FAILED, True):
            raise ValueError(f"aborted: {was_open}, by the tool: {by_tool}, and it ended as {end}")
        return end

    def _by_api(self, name: str) -> bool | None:
        """Abort through the API. Return whether the request was open, or None after an error."""
        asked = requests.post(self.server.url + ABORT, json={"request_ids": [name]}, timeout=60)
        with self.tally.lock:
            self.tally.aborts[asked.status_code] += 1
        return name in asked.json()["aborted"] if asked.ok else None

    def _by_tool(self, name: str) -> bool | None:
        """Abort with `tidegate abort`. Return True if the request was open, else None."""
        words = ("-P", "-m", "tools", "abort", name, "--port", str(self.server.port))
        ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
        return True if ran.stdout == f"aborted  {name}\n" else None


class KillStorm:
    """Runs many clients of a server, and kills its engine meanwhile. `run` returns after all
    requests have ended."""

    def __init__(self, server: Server, num_requests: int, num_kills: int) -> None:
        self.tally = Tally()
        self.memory: list[tuple[int, int]] = []  # (requests that had ended, KiB of the gateway)
        self._server = server
        self._num_requests = num_requests
        self._kills = [num_requests * (k + 1) // (num_kills + 1) for k in range(num_kills)]
        self._started = 0

    def run(self) -> None:
        clients = [threading.Thread(target=self._client, args=(seed,)) for seed in range(CLIENTS)]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            time.sleep(0.1)
            self._watch()
        for client in clients:
            client.join()

    def pid_of(self, words: str) -> int:
        """Return the id of the last process whose command line contains `words`. For gunicorn, this
        is the worker, not the master."""
        family = descendants_of(self._server.process.pid)
        return [pid for pid, line in family if words in line][-1]

    def _watch(self) -> None:
        num_ended = self.tally.ends.total()
        if self._kills and num_ended >= self._kills[0]:
            self._kills.pop(0)
            os.kill(self.pid_of("-m engine_core"), signal.SIGKILL)
            print(f"{num_ended} requests ended; the engine is killed", flush=True)
        if num_ended - (self.memory[-1][0] if self.memory else -1) >= self._num_requests // 20:
            status = Path(f"/proc/{self.pid_of('-m gunicorn')}/status").read_text()
            (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
            self.memory.append((num_ended, int(kib)))

    def _client(self, seed: int) -> None:
        client = StormClient(self._server, self.tally, random.Random(seed))
        while self._takes_one():
            try:
                end = client.ask()
            except Exception as error:  # reported as a request without exactly one end
                self.tally.wrong.append(f"{type(error).__name__}: {error}")
                end = "wrong"
            self.tally.count(end)
            if end == FAILED:
                time.sleep(PAUSE_S)

    def _takes_one(self) -> bool:
        with self.tally.lock:
            self._started += 1
            return self._started <= self._num_requests

    def complaints(self) -> list[str]:
        """Return the first errors of requests, and how the counts of the clients and of the gateway
        differ. Call it after `run`."""
        found = [f"wrong: {each}" for each in self.tally.wrong[:10]]
        counted = self._gateway_counts()
        num_counted = sum(counted.values())
        if num_counted != self._num_requests:
            found.append(f"{self._num_requests} requests, and {num_counted} ends: {counted}")
        ends = self.tally.ends
        if counted["aborted"] != ends[ABORTED]:
            found.append(
                f"{ends[ABORTED]} streams were aborted, and {counted['aborted']} are counted"
            )
        # A stream that a client left may have finished or failed at that moment.
        finished = counted["finished"] - ends[FINISHED]
        failed = counted["error"] + counted["refused"] - ends[FAILED] - ends[REFUSED]
        if min(finished, failed) < 0 or finished + failed + counted["disconnected"] != ends[LEFT]:
            found.append(f"clients saw {dict(ends)}, the gateway {counted}")
        return found

    def _gateway_counts(self) -> Counter[str]:
        """Wait until no request is open. Return the gateway's counts of the clients' requests, by
        end."""

        def is_idle() -> bool:
            now = metrics_of(self._server.url)
            return now.get("tidegate_engine_running") == now.get("tidegate_open_answers") == 0

        assert eventually(is_idle, within_s=WAIT_S), "something is still open"
        name = re.compile(r'tidegate_request_ends_total\{end="(\w+)"\}')
        rows = metrics_of(self._server.url)
        found = ((name.fullmatch(row), value) for row, value in rows.items())
        counts = Counter({match[1]: int(value) for match, value in found if match})
        models = 'tidegate_requests_total{route="/v1/models",status="200"}'
        counts["finished"] -= int(rows[models])  # the supervisor requests the served models
        for status, asked in self.tally.aborts.items():
            counted = int(rows[f'tidegate_requests_total{{route="{ABORT}",status="{status}"}}'])
            assert counted == asked, f"{asked} aborts were answered with {status}, not {counted}"
            counts["finished" if status == HTTPStatus.OK else "refused"] -= asked
        return counts

    def slope(self) -> float:
        """Return the growth of the gateway process in KiB per 1,000 requests, in the later half."""
        later = self.memory[len(self.memory) // 2 :]
        (first, before), (last, after) = later[0], later[-1]
        return 1000 * (after - before) / max(1, last - first)


def storm(model: Path, num_requests: int, num_kills: int) -> tuple[KillStorm, list[str]]:
    limit = ("--restart", "--restart-limit", str(num_kills + 1))
    with Server(*limit, "--max-slots", "8", model=str(model)) as server:
        result = KillStorm(server, num_requests, num_kills)
        result.run()
        found = result.complaints()
        server.signal(signal.SIGTERM)
        if (code := server.end(timeout_s=WAIT_S)) != 0:
            found.append(f"the server ended with {code}")
    return result, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=10_000, help="number of requests")
    parser.add_argument("--kills", type=int, default=5, help="how often a process is killed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result, found = storm(write_roomy_llama(Path(folder)), options.requests, options.kills)
    print(f"ends as clients saw them: {dict(result.tally.ends)}")
    print(f"gateway: {result.slope():.0f} KiB per 1,000 requests; {result.memory}")
    print("\n".join(found) or "all agree")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
