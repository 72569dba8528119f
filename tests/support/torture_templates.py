"""What chat templates of requests can do to everybody else: each hostile template, several at once,
against a real `tidegate serve` with a tiny model.

    python -m tests.support.torture_templates [--template "sorted"] [--at-once 4]

Meanwhile other clients stream chats, which the model's own template renders, and /livez is asked
all the time. Each template must be refused in words, no stream may be lost, /livez must answer in
time, and the gateway and its limited processes may not grow. The command prints a row for each
template and ends with 1 if there is any complaint. `make torture` runs all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import requests

from gateway.limited.process import MODULE
from tests.support.hostile_templates import LARGE, REFUSED, SLOW
from tests.support.processes import descendants_of, eventually
from tests.support.server import Server
from tests.support.torture import write_model

TEMPLATES = SLOW | LARGE | REFUSED
LIVEZ_MS = 100.0
"""What is promised, on a machine that has time for us."""
FLAT_MIB = 64
"""What the gateway, or all of its limited processes, may have grown by: pools keep some pages."""
NUM_WITNESSES, WITNESS_TOKENS = 2, 50
REQUEST_S = 300.0
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "w1 w2"}]
OWN = "{% for message in messages %}w1 {{ message.content }} {% endfor %}"
"""The model's own template."""
COLUMNS = ("template", "seconds", "answers", "/livez ms", "gateway MiB", "limited MiB", "streams")
WIDTHS = (36, 8, 16, 10, 12, 12, 0)


@dataclass(slots=True)
class Result:
    """What came of a template. Sizes in MiB: the gateway's, and those of its limited processes."""

    name: str
    seconds: float = 0.0
    statuses: list[int] = field(default_factory=list)
    livez_ms: float = 0.0
    num_streams: int = 0
    lost: list[str] = field(default_factory=list)
    before: tuple[int, int] = (0, 0)
    after: tuple[int, int] = (0, 0)

    def complaints(self, slack: float | None = 1.0) -> list[str]:
        """`slack` stretches what is promised; None: times do not count."""
        found = [f"answered with {status}" for status in self.statuses if status not in (400, 429)]
        found += [f"a stream of another client was lost: {end}" for end in self.lost]
        if not self.num_streams:
            found.append("no stream of another client came to its end")
        for who, before, after in zip(("gateway", "limited"), self.before, self.after, strict=True):
            if after - before > FLAT_MIB:
                found.append(f"{who}: grew from {before} to {after} MiB")
        if slack is not None and self.livez_ms > LIVEZ_MS * slack:
            found.append(f"/livez took {self.livez_ms:.0f} ms")
        return found

    def cells(self) -> tuple[str, ...]:
        counts = {status: self.statuses.count(status) for status in sorted(set(self.statuses))}
        sizes = [f"{b} -> {a}" for b, a in zip(self.before, self.after, strict=True)]
        return (
            self.name,
            f"{self.seconds:.1f}",
            ", ".join(f"{count} x {status}" for status, count in counts.items()),
            f"{self.livez_ms:.0f}",
            *sizes,
            str(self.num_streams),
        )


class Target:
    """A server that takes templates of requests."""

    def __init__(self, folder: Path) -> None:
        model = write_model(folder)
        (model / "chat_template.jinja").write_text(OWN)
        options = ("--max-slots", "8", "--trust-request-chat-template")
        self._server = Server(*options, model=str(model))

    def __enter__(self) -> Self:
        self._server.__enter__()
        facts = requests.get(self._server.url + "/readyz", timeout=5).json()
        self._gateway: int = facts["gateway"]["pid"]
        self._ask("{{ messages[0].content }}")  # the process for templates of requests is there
        return self

    def __exit__(self, *about: object) -> None:
        self._server.__exit__(None, None, None)

    def strike(self, name: str, at_once: int) -> Result:
        result = Result(name, before=self._sizes())
        is_over = threading.Event()
        with ThreadPoolExecutor(1 + NUM_WITNESSES + at_once) as pool:
            others = [pool.submit(self._probe, result, is_over)]
            others += [pool.submit(self._stream, result, is_over) for _ in range(NUM_WITNESSES)]
            started_at = time.monotonic()
            attackers = [pool.submit(self._ask, TEMPLATES[name]) for _ in range(at_once)]
            try:
                result.statuses = [each.result() for each in attackers]
            finally:
                result.seconds = time.monotonic() - started_at
                is_over.set()
            for each in others:
                each.result()
        eventually(lambda: self._is_flat(result), within_s=20)
        result.after = self._sizes()
        return result

    def _ask(self, template: str) -> int:
        body = {"messages": MESSAGES, "chat_template": template, "max_tokens": 1}
        return requests.post(self._server.url + CHAT, json=body, timeout=REQUEST_S).status_code

    def _probe(self, result: Result, is_over: threading.Event) -> None:
        with requests.Session() as session:
            while not is_over.wait(0.02):
                asked_at = time.perf_counter()
                session.get(self._server.url + "/livez", timeout=60)
                result.livez_ms = max(result.livez_ms, (time.perf_counter() - asked_at) * 1000)

    def _stream(self, result: Result, is_over: threading.Event) -> None:
        """At least one, and others until the attack is over."""
        body = {
            "messages": MESSAGES,
            "max_tokens": WITNESS_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        while True:
            with requests.post(
                self._server.url + CHAT, json=body, stream=True, timeout=REQUEST_S
            ) as response:
                lines = [line for line in response.iter_lines() if line]
            if response.ok and lines[-1] == b"data: [DONE]" and b'"error"' not in b"".join(lines):
                result.num_streams += 1
            else:
                result.lost.append(b"\n".join(lines[-2:]).decode())
            if is_over.is_set():
                return

    def _sizes(self) -> tuple[int, int]:
        limited = [pid for pid, line in descendants_of(self._gateway) if MODULE in line]
        return _rss_mib(self._gateway), sum(map(_rss_mib, limited))

    def _is_flat(self, result: Result) -> bool:
        grown = [a - b for a, b in zip(self._sizes(), result.before, strict=True)]
        return max(grown) <= FLAT_MIB


def _rss_mib(pid: int) -> int:
    """0: it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS"))


def show(row: Iterable[str]) -> None:
    print("  ".join(word.ljust(width) for word, width in zip(row, WIDTHS, strict=True)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--template", choices=TEMPLATES, action="append")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--slack", type=float, default=1.0, help="stretches what is promised")
    said = parser.parse_args()
    num_bad = 0
    show(COLUMNS)
    with tempfile.TemporaryDirectory() as folder, Target(Path(folder)) as target:
        for name in said.template or TEMPLATES:
            result = target.strike(name, said.at_once)
            show(result.cells())
            for complaint in result.complaints(said.slack):
                num_bad += 1
                print(f"    BAD: {complaint}", flush=True)
    print(f"{num_bad} complaints")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
