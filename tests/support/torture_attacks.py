"""What one client can do to all others over the network: huge and malformed bodies, requests that
are no HTTP, ZeroMQ clients that never read. Real processes, `tidegate serve` with a tiny model.

    python -m tests.support.torture_attacks [--attack "token ids"] [--at-once 16]

While an attack goes on, other clients stream answers, one after the other, and /livez is asked all
the time. Each attack must be refused in words, no stream may be lost, /livez must answer in time,
and no process may grow. The command prints a row for each attack and ends with 1 if there is any
complaint. `make torture` runs all; tests/e2e/test_torture_attacks.py runs a few.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import requests
import zmq

from protocol import wire
from protocol.arrays import Int32
from protocol.messages import PROTOCOL_VERSION, Generate, Hello, Look, Message, Ping
from protocol.sampling import SamplingParams
from tests.support.http import connect, exchange, read_body, read_head
from tests.support.processes import ROOT, eventually
from tests.support.server import Server
from tests.support.torture import write_model
from tests.support.torture_eyes import Client

MODULE = "tests.support.torture_attacks"
LIVEZ_MS = 100.0
"""What is promised, on a machine that has time for us."""
FLAT_MIB = 96
"""What a process may have grown by: it was new, and pools keep some pages."""
BODY_BYTES = 16 << 20
NUM_WITNESSES, WITNESS_TOKENS = 3, 100
ATTACK_TIMEOUT_S, STREAM_S = 120, 90.0
NUM_UNREAD = 2000
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
HI = b'"messages":[{"role":"user","content":"hi"}]'


@dataclass(frozen=True, slots=True)
class Body:
    """A body of BODY_BYTES of one unit; its answer has one of these statuses."""

    path: str
    head: bytes
    unit: bytes
    tail: bytes
    statuses: tuple[int, ...] = (400,)

    def send(self, port: int, _address: str) -> None:
        count = (BODY_BYTES - len(self.head) - len(self.tail)) // len(self.unit)
        data = self.head + self.unit * count + self.tail
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was not read
            status, _, told = exchange(port, self.path, data)
            assert status in self.statuses, (status, told[:200])
            assert status == 200 or "error" in json.loads(told)


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes that are no request, many times."""

    data: bytes
    statuses: tuple[int, ...] = (400,)
    num_times: int = 20

    def send(self, port: int, _address: str) -> None:
        for _ in range(self.num_times):
            with connect(port) as client, client.makefile("rb") as file:
                client.sendall(self.data)
                status, headers = read_head(file)
                assert status in self.statuses, status
                assert "error" in json.loads(read_body(file, headers))


@dataclass(frozen=True, slots=True)
class Unread:
    """A ZeroMQ client that greets the engine, says the same again and again, and never reads."""

    message: Message

    def send(self, _port: int, address: str) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            socket.send_multipart(wire.encode(Hello(protocol=PROTOCOL_VERSION, name="unread")))
            for _ in range(NUM_UNREAD):
                if not socket.poll(1000, zmq.POLLOUT):
                    return  # nobody is there any more
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(wire.encode(self.message), zmq.NOBLOCK)
            time.sleep(1)


Attack = Body | Raw | Unread
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ATTACKS: dict[str, Attack] = {
    "token ids": Body(GENERATE, b'{"sampling_params":{},"token_ids":[', b"1,", b"1]}"),
    "stop token ids": Body(
        GENERATE, b'{"token_ids":[1],"sampling_params":{"stop_token_ids":[', b"1,", b"1]}}"
    ),
    "detokenize": Body("/detokenize", b'{"tokens":[', b"1,", b"1]}"),
    "a prompt of ids": Body(COMPLETIONS, b'{"prompt":[', b"1,", b"1]}"),
    "prompts of ids": Body(COMPLETIONS, b'{"prompt":[', b"[1],", b"[1]]}"),
    "an unknown field": Body(CHAT, b"{" + HI + b',"x":[', b"[],", b"[]]}"),
    "tools": Body(CHAT, b"{" + HI + b',"tools":[', b"{},", b"{}]}"),
    "biases": Body(CHAT, b"{" + HI + b',"logit_bias":{', b'"1":1,', b'"2":1}}'),
    "derender: ids": Body(
        CHAT + "/derender", b'{"chat_request":{' + HI + b'},"prompt_token_ids":[', b"1,", b"1]}"
    ),
    "derender: strings": Body(
        CHAT + "/derender", b'{"chat_request":{' + HI + b'},"x":[', b'{"a":"b"},', b"1]}"
    ),
    "a text": Body(COMPLETIONS, b'{"prompt":"', b"Hello, world. ", b'"}'),
    "an escaped text": Body(COMPLETIONS, b'{"prompt":"', b"\\u00e9", b'"}'),
    "text without effect": Body(
        COMPLETIONS, b'{"prompt":"w5","max_tokens":1,"x":"', b"Hello, world. ", b'"}', (200,)
    ),
    "blanks": Body(COMPLETIONS, b'{"prompt":"w5","max_tokens":1', b" ", b"}", (200,)),
    "digits": Body(COMPLETIONS, b'{"prompt":"w5","max_tokens":', b"1", b"}"),
    "a chunk without a size": Raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n"),
    "a chunk without an end": Raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}xx"),
    "a compressed body": Raw(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 0\r\n\r\n", (415,)),
    "no request": Raw(b"tell me a story\r\n\r\n"),
    "a long line": Raw(b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", (400, 414)),
    "many headers": Raw(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n", (400, 431)),
    "unread welcomes": Unread(Hello(protocol=PROTOCOL_VERSION, name="unread")),
    "unread views": Unread(Look(request=1, most=10_000)),
    "unread pongs": Unread(Ping()),
    "unread answers": Unread(
        Generate(
            request=1,
            prompt=Int32.of([5] * 64),
            params=SamplingParams(max_tokens=64, ignore_eos=True, logprobs=20, prompt_logprobs=20),
        )
    ),
}


@dataclass(slots=True)
class Result:
    """What came of an attack. Sizes in MiB, of the gateway and of the engine.

    livez_ms  the slowest answer of /livez, without the time in which others had the processors
    """

    name: str
    said: str = ""
    livez_ms: float = 0.0
    num_streams: int = 0
    lost: list[str] = field(default_factory=list)
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def complaints(self, slack: float | None = 1.0) -> list[str]:
        """`slack` stretches what is promised; None: times do not count."""
        found = [f"not refused: {self.said}"] if self.said else []
        found += [f"a stream of another client was lost: {end}" for end in self.lost]
        if not self.num_streams:
            found.append("no stream of another client came to its end")
        for who, before, after in zip(("gateway", "engine"), self.before, self.after, strict=True):
            if after - before > FLAT_MIB:
                found.append(f"the {who} grew from {before} to {after} MiB")
        if slack is not None and self.livez_ms > LIVEZ_MS * slack:
            found.append(f"/livez took {self.livez_ms:.0f} ms")
        return found

    def cells(self) -> tuple[str, ...]:
        sizes = [f"{b} -> {a}" for b, a in zip(self.before, self.after, strict=True)]
        return (
            self.name,
            f"{self.livez_ms:.0f}",
            *sizes,
            str(self.num_streams),
            str(len(self.lost)),
        )


COLUMNS = ("attack", "/livez ms", "gateway MiB", "engine MiB", "streams", "lost")
WIDTHS = (24, 10, 14, 14, 8, 0)


class Target:
    """A server with a tiny model. Inside, clients stream answers until it is left."""

    def __init__(self, model: Path) -> None:
        self._server = Server("--max-slots", "8", "--token-budget", "64", model=str(model))

    def __enter__(self) -> Self:
        self._server.__enter__()
        facts = requests.get(self._server.url + "/readyz", timeout=5).json()
        self._pids = (facts["gateway"]["pid"], facts["engine"]["pid"])
        return self

    def __exit__(self, *about: object) -> None:
        self._server.__exit__(None, None, None)

    def strike(self, name: str, at_once: int) -> Result:
        result = Result(name, before=self._sizes())
        is_over = threading.Event()
        jobs: list[Callable[[], None]] = [lambda: self._probe(result, is_over)]
        jobs += [lambda: self._stream(result, is_over)] * NUM_WITNESSES
        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(job) for job in jobs]
            result.said = self._attack(name, at_once)
            is_over.set()
            for each in running:
                each.result()
        eventually(lambda: self._is_flat(result), within_s=20)
        result.after = self._sizes()
        return result

    def _attack(self, name: str, at_once: int) -> str:
        """In a process of its own, so the clients here have time. What went wrong, in words."""
        words = [sys.executable, "-P", "-m", MODULE, "--attack", name]
        words += ["--at-once", str(at_once), "--port", str(self._server.port)]
        done = subprocess.run(
            [*words, "--address", self._server.address],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=ATTACK_TIMEOUT_S,
        )
        return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""

    def _probe(self, result: Result, is_over: threading.Event) -> None:
        with requests.Session() as session:
            while not is_over.wait(0.01):
                asked_at, waited_s = time.perf_counter(), self._waited_s()
                session.get(self._server.url + "/livez", timeout=60)
                took_s = time.perf_counter() - asked_at - (self._waited_s() - waited_s)
                result.livez_ms = max(result.livez_ms, took_s * 1000)

    def _waited_s(self) -> float:
        """For how long the gateway and this thread could have run, and had no processor."""
        threads = (self._pids[0], self._pids[0]), (os.getpid(), threading.get_native_id())
        files = [Path(f"/proc/{pid}/task/{thread}/schedstat") for pid, thread in threads]
        return sum(int(file.read_text().split()[1]) for file in files if file.exists()) / 1e9

    def _stream(self, result: Result, is_over: threading.Event) -> None:
        while not is_over.is_set():
            with Client(self._server.url) as client:
                client.ask(3, WITNESS_TOKENS)
                eventually(lambda client=client: client.end, within_s=STREAM_S)
            if client.end == "finished":
                result.num_streams += 1
            else:
                result.lost.append(client.end)

    def _sizes(self) -> tuple[int, ...]:
        return tuple(_rss_mib(pid) for pid in self._pids)

    def _is_flat(self, result: Result) -> bool:
        grown = [a - b for a, b in zip(self._sizes(), result.before, strict=True)]
        return max(grown) <= FLAT_MIB


def _rss_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return int(line.split()[1]) >> 10


def send(name: str, at_once: int, port: int, address: str) -> None:
    """Be the attacker. Raises AssertionError if an answer is not what it must be."""
    with ThreadPoolExecutor(at_once) as pool:
        for each in [pool.submit(ATTACKS[name].send, port, address) for _ in range(at_once)]:
            each.result()


def show(row: Iterable[str]) -> None:
    print("  ".join(word.ljust(width) for word, width in zip(row, WIDTHS, strict=True)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--attack", choices=ATTACKS, action="append")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--slack", type=float, default=1.0, help="stretches what is promised")
    parser.add_argument("--port", type=int, help="be the attacker of this server")
    parser.add_argument("--address", default="", help="of its engine")
    said = parser.parse_args()
    if said.port:
        send(said.attack[0], said.at_once, said.port, said.address)
        return 0
    num_bad = 0
    show(COLUMNS)
    with tempfile.TemporaryDirectory() as folder, Target(write_model(Path(folder))) as target:
        target.strike("token ids", 1)  # pools are filled once
        for name in said.attack or ATTACKS:
            result = target.strike(name, said.at_once)
            show(result.cells())
            for complaint in result.complaints(said.slack):
                num_bad += 1
                print(f"    BAD: {complaint}", flush=True)
    print(f"{num_bad} complaints")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
