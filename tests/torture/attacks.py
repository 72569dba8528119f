"""Attacks by one client over the network: huge and malformed bodies, bytes that are not HTTP, and
ZeroMQ clients that never read. The target is `tidegate serve` with a tiny model.

    python -m tests.torture.attacks [--attack "token ids"] [--at-once 16]

During an attack, other clients stream answers, one after the other, and /livez is requested all the
time. Each invalid request must be refused with an error, no stream may be lost, /livez must answer
in time, and no process may grow. Meanwhile the gateway may hold no more than
docs/operate/request-limits.md says. The command prints a row for each attack and exits with 1 if
there is any complaint. `make torture` runs all; tests/e2e/test_torture_attacks.py runs a few.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
import requests
import zmq

from gateway.app import operations
from protocol.engine.messages import PROTOCOL_VERSION, Generate, GetStatus, Hello, Message, Ping
from protocol.engine.sampling import SamplingParams
from protocol.wire import codec
from protocol.wire.arrays import Int32
from tests.support.http import connect, exchange, read_body, read_head
from tests.support.processes import peak_mib, reset_peak, rss_mib
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_roomy_llama
from tests.torture.table import print_table
from tests.torture.witnesses import Witnessed, Witnesses, run_attacker

MODULE = "tests.torture.attacks"
FLAT_MIB = 60
"""Most MiB that a process may have gained after an attack."""
BODY_MIB = 16
"""The default of --max-body-mib."""
HELD_MIB, REQUEST_MIB = 4 * (8 * BODY_MIB // 2) + 4 * BODY_MIB, 2
"""Most MiB that one client's large bodies, and each of its requests, may take in a gateway during
an attack: docs/operate/request-limits.md, with the default options."""
BODY_BYTES = BODY_MIB << 20
NUM_WITNESSES, WITNESS_TOKENS = 3, 100
NUM_UNREAD = 2000
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RESPONSES = "/v1/responses"
HI = b'"messages":[{"role":"user","content":"hi"}]'


@dataclass(frozen=True, slots=True)
class AttackBody:
    """A body of about BODY_BYTES: `head`, then `unit` again and again, then `tail`.

    The response must have one of `statuses`, unless the server closes the connection before it has
    read the body.
    """

    path: str
    head: bytes
    unit: bytes
    tail: bytes
    statuses: tuple[int, ...] = (400,)

    def send(self, port: int, _address: str) -> None:
        count = (BODY_BYTES - len(self.head) - len(self.tail)) // len(self.unit)
        data = self.head + self.unit * count + self.tail
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was not read
            status, _, answer = exchange(port, self.path, data)
            assert status in self.statuses, (status, answer[:200])
            assert status == 200 or "error" in json.loads(answer)


@dataclass(frozen=True, slots=True)
class EveryRoute:
    """A body for each route that takes one. All of its fields that accept any text share
    BODY_BYTES. No response may be an error of the server."""

    def send(self, port: int, _address: str) -> None:
        for operation in operations():
            for body in operation.takes:
                self._send_to(port, operation.rule, body)

    def _send_to(self, port: int, rule: str, body: type) -> None:
        fields = msgspec.structs.fields(body)
        names = [field.encode_name for field in fields if _takes_text(field.type)]
        path = re.sub("<.*?>", "x", rule)
        text = "x" * ((BODY_BYTES - 4096) // max(1, len(names)))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was not read
            status, _, answer = exchange(port, path, dict.fromkeys(names, text))
            assert status < 500, (path, status, answer[:200])


def _takes_text(kind: Any) -> bool:
    """Return whether a field of this type accepts a text, whatever its length is."""
    try:
        return bool(msgspec.convert("x" * 17, kind))
    except msgspec.ValidationError:
        return False


@dataclass(frozen=True, slots=True)
class RawBytes:
    """Bytes that are not a valid request, sent `num_times` times, each time over a new connection.
    Each response must have one of `statuses`."""

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
class UnreadAnswers:
    """A ZeroMQ client that greets the engine, sends one message many times, and never reads."""

    message: Message

    def send(self, _port: int, address: str) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            socket.send_multipart(codec.encode(Hello(protocol=PROTOCOL_VERSION, name="unread")))
            for _ in range(NUM_UNREAD):
                if not socket.poll(1000, zmq.POLLOUT):
                    return  # the engine has disconnected
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(codec.encode(self.message), zmq.NOBLOCK)
            time.sleep(1)


class Attack(Protocol):
    def send(self, port: int, address: str) -> None:
        """Attack the gateway at a port, or its engine. Raises AssertionError if a response is
        wrong."""


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ATTACKS: dict[str, Attack] = {
    "token ids": AttackBody(GENERATE, b'{"sampling_params":{},"token_ids":[', b"1,", b"1]}"),
    "stop token ids": AttackBody(
        GENERATE, b'{"token_ids":[1],"sampling_params":{"stop_token_ids":[', b"1,", b"1]}}"
    ),
    "detokenize": AttackBody("/detokenize", b'{"tokens":[', b"1,", b"1]}"),
    "a prompt of ids": AttackBody(COMPLETIONS, b'{"prompt":[', b"1,", b"1]}"),
    "prompts of ids": AttackBody(COMPLETIONS, b'{"prompt":[', b"[1],", b"[1]]}"),
    "an unknown field": AttackBody(CHAT, b"{" + HI + b',"x":[', b"[],", b"[]]}"),
    "tools": AttackBody(CHAT, b"{" + HI + b',"tools":[', b"{},", b"{}]}"),
    "biases": AttackBody(CHAT, b"{" + HI + b',"logit_bias":{', b'"1":1,', b'"2":1}}'),
    "derender: ids": AttackBody(
        CHAT + "/derender", b'{"chat_request":{' + HI + b'},"prompt_token_ids":[', b"1,", b"1]}"
    ),
    "derender: strings": AttackBody(
        CHAT + "/derender", b'{"chat_request":{' + HI + b'},"x":[', b'{"a":"b"},', b"1]}"
    ),
    "a text": AttackBody(COMPLETIONS, b'{"prompt":"', b"Hello, world. ", b'"}'),
    "an escaped text": AttackBody(COMPLETIONS, b'{"prompt":"', b"\\u00e9", b'"}'),
    "text without effect": AttackBody(
        COMPLETIONS, b'{"prompt":"w5","max_tokens":1,"x":"', b"Hello, world. ", b'"}', (200,)
    ),
    "blanks": AttackBody(COMPLETIONS, b'{"prompt":"w5","max_tokens":1', b" ", b"}", (200,)),
    "digits": AttackBody(COMPLETIONS, b'{"prompt":"w5","max_tokens":', b"1", b"}"),
    "a regular expression": AttackBody(
        COMPLETIONS, b'{"prompt":"w5","structured_outputs":{"regex":"', b"abc", b'"}}'
    ),
    "a schema": AttackBody(
        CHAT, b"{" + HI + b',"guided_json":{"type":"string","pattern":"', b"abc", b'"}}'
    ),
    "a user": AttackBody(RESPONSES, b'{"input":"w5","background":true,"user":"', b"abc", b'"}'),
    "template arguments": AttackBody(
        CHAT,
        b"{" + HI + b',"max_tokens":64,"ignore_eos":true,"chat_template_kwargs":{"x":"',
        b"abc",
        b'"}}',
        (200, 400, 429),
    ),
    "every route": EveryRoute(),
    "a chunk without a size": RawBytes(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n"),
    "a chunk without an end": RawBytes(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}xx"),
    "a compressed body": RawBytes(
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 0\r\n\r\n", (415,)
    ),
    "no request": RawBytes(b"tell me a story\r\n\r\n"),
    "a long line": RawBytes(b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", (400, 414)),
    "many headers": RawBytes(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n", (400, 431)),
    "unread welcomes": UnreadAnswers(Hello(protocol=PROTOCOL_VERSION, name="unread")),
    "unread views": UnreadAnswers(GetStatus(request=1, max_rows=10_000)),
    "unread pongs": UnreadAnswers(Ping()),
    "unread answers": UnreadAnswers(
        Generate(
            request=1,
            prompt=Int32.of([5] * 64),
            params=SamplingParams(max_tokens=64, ignore_eos=True, logprobs=20, prompt_logprobs=20),
        )
    ),
}


@dataclass(frozen=True, slots=True)
class AttackResult:
    """The result of an attack.

    failure    why the attack was not refused; "" if it was
    held_mib   how much more memory the gateway needed during the attack than before
    most_mib   how much it may need
    """

    name: str
    failure: str
    witnessed: Witnessed
    held_mib: int
    most_mib: int

    def complaints(self, slack: float | None = 1.0) -> list[str]:
        """Return what is wrong. `slack` stretches time limits; None: times are not checked."""
        found = [f"not refused: {self.failure}"] if self.failure else []
        if self.held_mib > self.most_mib:
            found.append(f"gateway: held {self.held_mib} MiB; {self.most_mib} are allowed")
        return found + self.witnessed.complaints(slack)

    def cells(self) -> tuple[str, ...]:
        seen = self.witnessed
        livez_ms = f"{seen.livez_ms:.0f}"
        held = str(self.held_mib)
        return (
            self.name,
            livez_ms,
            *seen.sizes(),
            held,
            str(seen.num_streams),
            str(len(seen.lost)),
        )


COLUMNS = {
    "attack": 24,
    "/livez ms": 10,
    "gateway MiB": 14,
    "engine MiB": 14,
    "held MiB": 8,
    "streams": 8,
    "lost": 0,
}


class AttackTarget(Server):
    """A server with a tiny model, which `strike` attacks while other clients stream answers.

    module   the program that sends the attacks
    options  further options of the server
    """

    def __init__(self, model: Path, *options: str, module: str = MODULE) -> None:
        self._module = module
        sizes = "--max-slots", "8", "--token-budget", "64"
        super().__init__(*sizes, *options, model=str(model))

    def __enter__(self) -> Self:
        super().__enter__()
        facts = requests.get(self.url + "/readyz", timeout=5).json()
        self._pids = {name: int(facts[name]["pid"]) for name in ("gateway", "engine")}
        return self

    def strike(self, name: str, at_once: int) -> AttackResult:
        witnesses = Witnesses(
            self.url,
            self._pids["gateway"],
            self._sizes,
            lambda client: client.ask(3, WITNESS_TOKENS),
            num_streams=NUM_WITNESSES,
            flat_mib=FLAT_MIB,
        )
        options = ("--attack", name, "--at-once", str(at_once))
        server = ("--port", str(self.port), "--address", self.address)
        gateway = self._pids["gateway"]
        reset_peak(gateway)
        before = rss_mib(gateway)
        with witnesses as witnessed:
            attacker = run_attacker(self._module, *options, *server)
            held = peak_mib(gateway) - before
        return AttackResult(
            name, attacker.failure, witnessed, held, HELD_MIB + at_once * REQUEST_MIB
        )

    def _sizes(self) -> dict[str, int]:
        return {name: rss_mib(pid) for name, pid in self._pids.items()}


def send(attack: Attack, at_once: int, port: int, address: str) -> None:
    """Run an attack `at_once` times in parallel. Raises AssertionError if a response is wrong."""
    with ThreadPoolExecutor(at_once) as pool:
        for each in [pool.submit(attack.send, port, address) for _ in range(at_once)]:
            each.result()


def run(
    description: str, attacks: Mapping[str, Attack], make_target: Callable[[Path], AttackTarget]
) -> int:
    """Run the attacks that the command line names. Return the exit code.

    attacks      the first one is also sent once before the others, so that pools are filled
    make_target  returns the server to attack, whose model is written to the folder
    """
    parser = argparse.ArgumentParser(description=description.split("\n\n", maxsplit=1)[0])
    parser.add_argument(
        "--attack", choices=attacks, action="append", help="attack to run (default: all)"
    )
    parser.add_argument(
        "--at-once", type=int, default=16, help="number of attacks at the same time"
    )
    parser.add_argument("--slack", type=float, default=1.0, help="factor for all time limits")
    parser.add_argument("--port", type=int, help="attack the server at this port")
    parser.add_argument("--address", default="", help="address of the server's engine")
    options = parser.parse_args()
    if options.port:
        send(attacks[options.attack[0]], options.at_once, options.port, options.address)
        return 0
    with tempfile.TemporaryDirectory() as folder, make_target(Path(folder)) as target:
        target.strike(next(iter(attacks)), 1)
        rows = (target.strike(name, options.at_once) for name in options.attack or attacks)
        return print_table(COLUMNS, rows, options.slack)


if __name__ == "__main__":
    sys.exit(run(__doc__, ATTACKS, lambda folder: AttackTarget(write_roomy_llama(folder))))
