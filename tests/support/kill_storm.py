"""Many clients around a server whose engine is killed again and again: who asked got exactly one
end, and the gateway counted what its clients counted.

    python -m tests.support.kill_storm [--requests 10000] [--kills 5]

Clients ask for whole answers and for streams, hang up in the middle, and send nonsense. The engine
is killed each time a share of all requests has ended; the server runs with --restart. Memory of the
gateway process is told as a slope. Ends with 1 if anything does not agree.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import requests

from tests.support.processes import descendants_of, eventually
from tests.support.server import Server
from tests.support.small_requests import FINISHED, LEFT, REFUSED
from tests.support.torture import write_model

CLIENTS = 12
PAUSE_S = 0.2
"""After a 503, as a client that was told to come back would."""
FAILED = "failed"
WAIT_S = 120.0


@dataclass(slots=True)
class Tally:
    """What the clients saw. `wrong`: requests without exactly one end."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, end: str) -> int:
        """How many have ended by now."""
        with self.lock:
            self.ends[end] += 1
            return self.ends.total()


def end_of_stream(lines: Iterable[bytes]) -> str:
    """FINISHED or FAILED. Raises ValueError where a stream has not exactly one end, and it last."""
    ends: list[str] = []
    for line in filter(None, lines):
        if ends[-1:] == ["[DONE]"]:
            raise ValueError(f"news after the end: {line!r}")
        data = line.removeprefix(b"data: ")
        if data == b"[DONE]":
            ends.append("[DONE]")
            continue
        event: Mapping[str, Any] = json.loads(data)
        if "error" in event:
            ends.append(FAILED)
        elif any(choice["finish_reason"] for choice in event["choices"]):
            ends.append(FINISHED)
    if len(ends) != 2 or ends[1] != "[DONE]":
        raise ValueError(f"a stream that ends with {ends}")
    return ends[0]


def ask(url: str, dice: random.Random) -> str:
    """One request of a kind that the dice choose; its end as its client sees it."""
    kind = dice.choices(("whole", "stream", "leave", "nonsense"), (50, 30, 12, 8))[0]
    prompt = " ".join(f"w{dice.randrange(3, 90)}" for _ in range(dice.randrange(1, 60)))
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": dice.randrange(1, 24)}
    if kind == "nonsense":
        body = dice.choice([{}, {"prompt": 7}, {**body, "max_tokens": -1}, {**body, "n": 10**9}])
    if kind in ("stream", "leave"):
        body["stream"] = True
    if kind == "leave":
        body |= {"max_tokens": 2000, "ignore_eos": True}
    with requests.post(url, json=body, stream=True, timeout=60) as response:
        if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            return FAILED
        if not response.ok:
            return REFUSED
        if kind == "leave":
            next(response.iter_lines())
            return LEFT
        if kind == "stream":
            return end_of_stream(response.iter_lines())
        assert response.json()["choices"][0]["finish_reason"]
        return FINISHED


class Storm:
    """`run` returns when so many requests have ended."""

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
        """The last of those whose command line has them: gunicorn's worker, not its master."""
        family = descendants_of(self._server.process.pid)
        return [pid for pid, line in family if words in line][-1]

    def metrics(self) -> dict[str, float]:
        text = requests.get(self._server.url + "/metrics", timeout=10).text
        rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}

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
        dice = random.Random(seed)
        url = self._server.url + "/v1/completions"
        while self._takes_one():
            try:
                end = ask(url, dice)
            except Exception as error:  # a request without an end is what we look for
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
        """What does not agree, when all have ended."""
        found = [f"wrong: {each}" for each in self.tally.wrong[:10]]
        told = self._settled()
        num_told = sum(told.values())
        if num_told != self._num_requests:
            found.append(f"{self._num_requests} requests, and {num_told} ends: {told}")
        ends = self.tally.ends
        # Who left does not know how it would have ended: it may have, or failed, at that moment.
        finished = told["finished"] - ends[FINISHED]
        failed = told["error"] + told["refused"] - ends[FAILED] - ends[REFUSED]
        if min(finished, failed) < 0 or finished + failed + told["disconnected"] != ends[LEFT]:
            found.append(f"clients saw {dict(ends)}, the gateway {told}")
        return found

    def _settled(self) -> Counter[str]:
        """The gateway's counts of our requests, when nothing is open any more."""

        def is_idle() -> bool:
            now = self.metrics()
            return now.get("tidegate_engine_running") == now.get("tidegate_open_answers") == 0

        assert eventually(is_idle, within_s=WAIT_S), "something is still open"
        name = re.compile(r'tidegate_request_ends_total\{end="(\w+)"\}')
        rows = self.metrics()
        found = ((name.fullmatch(row), value) for row, value in rows.items())
        told = Counter({match[1]: int(value) for match, value in found if match})
        models = 'tidegate_requests_total{route="/v1/models",status="200"}'
        told["finished"] -= int(rows[models])  # the supervisor's, who asks what is served
        return told

    def slope(self) -> float:
        """KiB of the gateway process per 1,000 requests, over the later half."""
        later = self.memory[len(self.memory) // 2 :]
        (first, before), (last, after) = later[0], later[-1]
        return 1000 * (after - before) / max(1, last - first)


def storm(model: Path, num_requests: int, num_kills: int) -> tuple[Storm, list[str]]:
    limit = ("--restart", "--restart-limit", str(num_kills + 1))
    with Server(*limit, "--max-slots", "8", model=str(model)) as server:
        weather = Storm(server, num_requests, num_kills)
        weather.run()
        found = weather.complaints()
        server.signal(signal.SIGTERM)
        if (code := server.end(timeout_s=WAIT_S)) != 0:
            found.append(f"the server ended with {code}")
    return weather, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=5)
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weather, found = storm(write_model(Path(folder)), said.requests, said.kills)
    print(f"ends as clients saw them: {dict(weather.tally.ends)}")
    print(f"gateway: {weather.slope():.0f} KiB per 1,000 requests; {weather.memory}")
    print("\n".join(found) or "all agree")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
