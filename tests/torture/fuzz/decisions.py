"""Sends malformed messages to the sockets of an engine and of a gateway.

Each target sends about `count` messages. It raises AssertionError unless the process under test

- stays alive and answers its other clients meanwhile,
- refuses exactly the messages that are malformed (`engine_worker`: all messages),
- does not grow, and
- still answers correctly afterwards.
"""

from __future__ import annotations

import tempfile
from collections import deque
from itertools import islice
from random import Random
from typing import Any

import msgspec
import requests
import zmq

from protocol.engine import messages
from protocol.engine.messages import (
    AbortByLabel,
    Aborted,
    Drain,
    EngineStopped,
    Ping,
    Pong,
    Profile,
    Refused,
    Welcome,
)
from protocol.sdk.client import Client
from protocol.wire.cluster_key import ClusterKey
from protocol.worker import steps
from tests.support.engine_view import is_free
from tests.support.gateway_process import GatewayProcess
from tests.support.http import metric_of
from tests.support.raw_client import RawClient
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tiny_engine import tiny_engine
from tests.support.waiting import eventually
from tests.torture.fuzz.frames import BATCH, Frames, Nonsense, batches
from tests.torture.fuzz.outcome import PATIENCE_S, Outcome, watched

LAST = 1 << 40


# ---- the engine


def engine_clients(count: int, seed: int) -> Outcome:
    """Send malformed messages as clients of an engine. Another client receives correct answers
    meanwhile."""
    outcome = Outcome("engine, from clients")
    with tiny_engine() as (program, address), Client(address) as polite:
        before = wire_errors(address)
        with watched(outcome, lambda: program.process.pid) as is_warm:
            nonsense = Nonsense(messages.ToEngine, Random(seed), never=(Drain, Profile))
            for number, batch in enumerate(batches(nonsense, count, outcome)):
                send_to_engine(address, batch)
                check_answer(polite)
                if number == count // BATCH // 10:
                    is_warm()
        outcome.counted = wire_errors(address) - before
        assert outcome.counted == outcome.malformed, outcome
        assert eventually(lambda: is_free(polite.stats), within_s=PATIENCE_S)
    return outcome


def send_to_engine(address: str, batch: list[Frames], key: ClusterKey | None = None) -> None:
    """Greet the engine, send it the batch, and wait for the answer to a last, valid message. Every
    message that the engine sends meanwhile must be well-formed."""
    with RawClient(address, key) as client:
        client.socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        client.greet()
        for frames in batch:
            client.socket.send_multipart(frames)
        client.send(AbortByLabel(request=LAST, names=["nobody"]))
        while client.receive() != Aborted(request=LAST, unknown=["nobody"]):
            pass


def wire_errors(address: str, key: ClusterKey | None = None) -> int:
    """Return how many malformed messages the engine has counted."""
    with RawClient(address, key) as client:
        client.greet()
        client.send(Ping())
        pong = client.receive_kind(Pong)
    assert isinstance(pong, Pong)
    return pong.stats.num_wire_errors


def check_answer(engine: Client) -> None:
    """Raise AssertionError unless the engine answers a request correctly."""
    bias = {7: 100.0}
    answer = engine.generate([3, 4], max_tokens=3, logit_bias=bias, ignore_eos=True)
    assert answer.tokens() == [7, 7, 7]


def engine_worker(count: int, seed: int) -> Outcome:
    """Send malformed messages to the socket that an engine has for its worker. All of them are
    refused, valid or not, because the engine has a worker already."""
    outcome = Outcome("engine, from strangers")
    with (
        tiny_engine() as (program, address),
        Client(address) as polite,
        RawClient(address + ".worker") as stranger,
    ):
        before = wire_errors(address)
        with watched(outcome, lambda: program.process.pid) as is_warm:
            nonsense = Nonsense(steps.FromWorker, Random(seed))
            for number, batch in enumerate(batches(nonsense, count, outcome)):
                for frames in batch:
                    stranger.socket.send_multipart(frames)
                check_answer(polite)
                if number == count // BATCH // 10:
                    is_warm()
            assert eventually(
                lambda: wire_errors(address) == before + outcome.sent, within_s=PATIENCE_S
            )
        outcome.counted = outcome.sent
        check_answer(polite)
    return outcome


# ---- the gateway


LOSING = (EngineStopped, Refused, Welcome, Pong)
"""Messages that can make a gateway end all of its requests at this engine with an error."""


class NoisyEngine(ScriptedEngine):
    """A scripted engine that also sends the messages in `noise`, between its own messages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.noise: deque[Frames] = deque()
        self._gateways: set[bytes] = set()

    def _round(self) -> None:
        for _ in range(min(len(self.noise), 50)):
            frames = self.noise.popleft()
            for gateway in self._gateways:
                self._socket.send_multipart([gateway, *frames])
        super()._round()

    def _send(self, client: bytes, message: msgspec.Struct) -> None:
        self._gateways.add(client)
        super()._send(client, message)


def gateway(count: int, seed: int) -> Outcome:
    """Send malformed messages to a gateway as its engine, while chats are open. Every chat must
    end."""
    outcome = Outcome("gateway, from its engine")
    with tempfile.TemporaryDirectory() as folder, NoisyEngine(f"ipc://{folder}/engine") as engine:
        config: dict[str, Any] = {
            "engine": engine.address,
            "response_store": "none",
            "log_requests": False,
        }
        with GatewayProcess(**config) as process:
            process.await_ready()
            with watched(outcome, lambda: _served_by(process)) as is_warm:
                wild = Nonsense(messages.ToClient, Random(seed))
                calm = Nonsense(messages.ToClient, Random(seed + 1), never=LOSING)
                while outcome.sent < count:
                    for nonsense in [calm] * 19 + [wild]:
                        _disturb(process, engine, nonsense, outcome, count)
                    assert eventually(lambda: _answers_hello(process), within_s=PATIENCE_S)
                    if outcome.sent >= count // 10:
                        is_warm()
                assert eventually(
                    lambda: _counted(process) >= outcome.malformed, within_s=PATIENCE_S
                )
            outcome.counted = _counted(process)
            assert outcome.counted == outcome.malformed, outcome
            engine.lose_clients()
    return outcome


def _disturb(
    process: GatewayProcess, engine: NoisyEngine, nonsense: Nonsense, outcome: Outcome, count: int
) -> None:
    for batch in islice(batches(nonsense, count, outcome), 1):
        engine.noise += batch
        outcome.notes[f"answers of {_chat(process).status_code}"] += 1
        assert eventually(lambda: not engine.noise, within_s=PATIENCE_S)


def _chat(process: GatewayProcess) -> requests.Response:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "timeout_s": 5}
    return requests.post(process.url + "/v1/chat/completions", json=body, timeout=PATIENCE_S)


def _answers_hello(process: GatewayProcess) -> bool:
    answer = _chat(process)
    if answer.status_code != 200:
        return False
    return bool(answer.json()["choices"][0]["message"]["content"] == "Hello, world!")


def _served_by(process: GatewayProcess) -> int:
    return int(requests.get(process.url + "/readyz", timeout=20).json()["gateway"]["pid"])


def _counted(process: GatewayProcess) -> int:
    return int(metric_of(process.url, "tidegate_gateway_wire_errors_total"))
