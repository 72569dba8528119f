"""The engine's socket for clients: malformed messages are refused, and lost clients are
detected."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from engine_core.connections.clients import MAX_UNREAD_BYTES, MAX_UNREAD_WITH_RESULTS, STALLED_S
from engine_core.connections.mailbox import Mailbox
from engine_core.result_sender import send_results
from protocol.engine.messages import (
    PROTOCOL_VERSION,
    EngineStopped,
    Generate,
    Hello,
    Limits,
    Outputs,
    Pong,
    Probe,
    Refused,
    ToClient,
    ToEngine,
    Welcome,
)
from protocol.engine.sampling import SamplingParams
from protocol.engine.session import Session
from protocol.engine.stats import EngineStats
from protocol.wire import codec
from protocol.wire.errors import ErrorInfo
from tests.support.engines import ECHO_SIZE, Bench
from tests.support.scripted_engine import scripted_card
from tests.support.waiting import eventually

WAIT_MS = 10_000
PONG = Pong(epoch="e", stats=EngineStats())
Socket = zmq.Socket[bytes]


class MailboxScene:
    """A mailbox, one client of it, and the clients that it has reported lost."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.gone: list[bytes] = []
        self.mail = Mailbox(
            self.context, address, None, lease_s=60.0, on_client_lost=self.gone.append
        )
        self._address = address
        self._clients: list[Socket] = []  # kept until the context closes them
        self.client = self.connect()

    def connect(self) -> Socket:
        client = self.context.socket(zmq.DEALER)
        client.connect(self._address)
        self._clients.append(client)
        return client

    def receive(self, num_frames: int) -> list[tuple[bytes, ToEngine]]:
        """Wait until the mailbox has received `num_frames` messages. Return (client, message) for
        each that is not malformed."""
        found: list[tuple[bytes, ToEngine]] = []
        before = self.mail.num_wire_errors
        while len(found) + self.mail.num_wire_errors - before < num_frames:
            assert self.mail.socket.poll(WAIT_MS), "nothing came"
            found += self.mail.receive(1.0)
        return found

    def next_message(self) -> ToClient:
        assert self.client.poll(WAIT_MS), "nothing was sent"
        return codec.Decoder[ToClient](ToClient).decode(self.client.recv_multipart())

    def greet(self, socket: Socket | None = None) -> bytes:
        (socket or self.client).send_multipart(
            codec.encode(Hello(protocol=PROTOCOL_VERSION, name="x"))
        )
        ((client, message),) = self.receive(1)
        assert isinstance(message, Hello)
        self.mail.clients.add(client, 1.0, message.name)
        return client

    @contextmanager
    def disconnection(self) -> Iterator[None]:
        """Wait at the end of the `with` block until the mailbox has ended a connection."""
        watcher = self.mail.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        yield
        assert watcher.poll(WAIT_MS), "no connection was ended"
        self.mail.socket.disable_monitor()
        watcher.close(linger=0)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[MailboxScene]:
    scene = MailboxScene(f"ipc://{tmp_path}/m")
    yield scene
    scene.mail.close()
    scene.context.destroy(linger=0)


def test_malformed_messages_are_refused_and_counted_and_later_ones_received(
    scene: MailboxScene, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        scene.client.send(b"nonsense")
    assert scene.receive(5) == []
    assert scene.mail.num_wire_errors == 5
    refusals = [scene.next_message() for _ in range(5)]
    assert all(isinstance(result, Refused) and result.request == -1 for result in refusals)
    assert len([r for r in caplog.records if "malformed" in r.message]) == 3  # 1st, 2nd, 4th
    client = scene.greet()
    scene.mail.send(client, PONG)
    assert scene.next_message() == PONG
    assert scene.gone == []


def test_the_refusal_of_a_malformed_request_ends_only_this_request(scene: MailboxScene) -> None:
    client, session = scene.greet(), Session("x")
    limits = Limits(
        max_len=64, max_slots=2, block_tokens=4, num_blocks=9, token_budget=8, prefix_cache=True
    )
    welcome = Welcome(protocol=PROTOCOL_VERSION, epoch="e", model=scripted_card(), limits=limits)
    session.receive(welcome, 1.0)
    good, bad = (session.generate(range(2_000), SamplingParams()) for _ in range(2))
    bad.params.stop_token_ids.extend(range(129))  # more than the engine reads
    for message in (good, bad):
        scene.client.send_multipart(codec.encode(message))
    assert scene.receive(2) == [(client, good)]
    ((request, report),) = session.receive(scene.next_message(), 1.0)
    assert request == bad.request
    assert isinstance(report, Refused)
    assert "stop_token_ids" in report.error.message
    assert session.open == {good.request: Generate}


def test_an_unreachable_client_is_reported_gone_once(scene: MailboxScene) -> None:
    client = scene.greet()
    scene.mail.clients.add(b"left", 1.0, "y")
    scene.mail.broadcast(PONG)
    scene.mail.send(b"left", PONG)
    assert scene.gone == [b"left"]
    assert scene.next_message() == PONG
    assert scene.mail.clients.all() == [client]


def test_a_client_that_leaves_while_the_model_loads_is_not_logged(
    scene: MailboxScene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for name in (b"early", b"late"):
        scene.mail.logs_clients = name == b"late"
        scene.mail.clients.add(name, 1.0, "y")
        scene.mail.send(name, PONG)
    assert scene.gone == [b"early", b"late"]
    assert [line for line in caplog.messages if "is gone" in line] == [
        f"client {b'late'.hex()} is gone: Host unreachable"
    ]


def test_an_unreachable_stranger_is_not_reported_lost(scene: MailboxScene) -> None:
    scene.mail.send_each({b"stranger": PONG})
    assert scene.gone == []


SILENT_CLIENT = """
import sys, time
import zmq
from protocol.wire import codec
from protocol.engine.messages import PROTOCOL_VERSION, Hello
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send_multipart(codec.encode(Hello(protocol=PROTOCOL_VERSION, name="other")))
while True:
    time.sleep(1)
"""


def test_a_client_that_is_busy_is_probed_and_stays(scene: MailboxScene) -> None:
    client = scene.greet()
    scene.mail.check_clients(31.0)
    assert scene.mail.clients.all() == [client]
    assert scene.next_message() == Probe()
    assert scene.gone == []


def test_a_client_that_is_connected_and_silent_beyond_its_lease_is_gone(
    scene: MailboxScene,
) -> None:
    client = scene.greet()
    with scene.disconnection():
        scene.mail.check_clients(62.0)
    assert scene.gone == [client]


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_client_that_is_stopped_or_dead_is_gone(
    scene: MailboxScene, tmp_path: Path, sent: signal.Signals
) -> None:
    words = [sys.executable, "-c", SILENT_CLIENT, f"ipc://{tmp_path}/m"]
    with subprocess.Popen(words) as process:
        ((other, _),) = scene.receive(1)
        scene.mail.clients.add(other, 1.0)
        client = scene.greet()
        process.send_signal(sent)
        now = 3.5

        def is_gone() -> bool:
            nonlocal now
            now += 1.1  # so it is probed each time
            scene.mail.clients.on_message(client, now)
            scene.mail.clients.on_message(other, now - 3)
            scene.mail.check_clients(now)
            return bool(scene.gone)

        try:
            assert eventually(is_gone, within_s=60)
        finally:
            process.kill()
    assert scene.gone == [other]
    assert scene.mail.clients.all() == [client]


def test_a_client_that_never_reads_is_disconnected_and_may_connect_again(
    scene: MailboxScene,
) -> None:
    client = scene.greet()
    large = EngineStopped(error=ErrorInfo(code="x", message="x" * (1 << 20)))
    for _ in range(MAX_UNREAD_BYTES >> 20):
        scene.mail.send(client, large)
    assert scene.gone == []
    with scene.disconnection():
        scene.mail.send(client, PONG)
    assert scene.gone == [client]
    again: list[tuple[bytes, ToEngine]] = []

    def is_back() -> bool:
        scene.client.send_multipart(codec.encode(Hello(protocol=PROTOCOL_VERSION, name="x")))
        again.extend(scene.mail.receive(1.0))
        return bool(again)

    assert eventually(is_back, within_s=WAIT_MS / 1000)
    assert again[0][0] != client
    scene.mail.clients.add(again[0][0], 1.0)
    scene.mail.send(again[0][0], PONG)
    assert scene.gone == [client]


def test_a_client_that_acknowledges_what_it_reads_is_never_dropped(scene: MailboxScene) -> None:
    client = scene.greet()
    large = EngineStopped(error=ErrorInfo(code="x", message="x" * (8 << 20)))
    for _ in range(2 * (MAX_UNREAD_BYTES >> 23)):
        scene.mail.send(client, large)
        scene.next_message()
        scene.mail.clients.on_read(client, scene.mail.clients.sent_bytes(client), 1.0)
    assert scene.gone == []


def test_clients_that_never_read_are_bounded_together_and_cost_a_reader_nothing(
    scene: MailboxScene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bound, size, num_rounds = 16 << 20, 1 << 20, 4
    monkeypatch.setattr("engine_core.connections.clients.MAX_TOTAL_UNREAD_BYTES", bound)
    large = EngineStopped(error=ErrorInfo(code="x", message="x" * size))
    message_bytes = sum(len(bytes(frame)) for frame in codec.encode(large))
    reader = scene.greet()
    num_clients = 2 * bound // size // num_rounds
    never_read = [scene.greet(scene.connect()) for _ in range(num_clients)]
    clients = scene.mail.clients
    for _ in range(num_rounds):
        for other in never_read:
            scene.mail.send(other, large)
            assert clients.unread_bytes <= bound + message_bytes
            scene.mail.send(reader, large)
            assert scene.next_message() == large
            clients.on_read(reader, clients.sent_bytes(reader), time.monotonic())
    assert reader in clients
    assert set(scene.gone) < set(never_read)
    assert clients.unread_bytes > bound - num_rounds * message_bytes, "no more than needed"
    assert len([r for r in caplog.records if "does not read" in r.message]) == len(scene.gone)


RESULT_BYTES = 4 * ECHO_SIZE


class ResultScene(MailboxScene):
    """A mailbox of an engine that has computed results for clients which have not read."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.bench = Bench(token_budget=8, max_waiting=5000)
        self.now = 1.0  # when clients were added

    def compute(self, client: bytes) -> None:
        """Compute a result for `client`, and leave it in the engine."""
        self.bench.not_reading.add(client)
        self.bench.encode([1] * 8, client=client)
        self.bench.run()

    def send_results(self, after_s: float = 0.0) -> None:
        self.now += after_s
        send_results(self.bench.engine, self.mail, 60.0, self.now)
        for client in self.gone:
            self.bench.engine.on_client_lost(client)

    def unsent(self) -> set[bytes]:
        return set(self.bench.engine.encoding.unsent.clients)

    def stay_behind(self, client: bytes, num_bytes: int) -> None:
        """Count bytes as unread, and all before as read."""
        clients = self.mail.clients
        clients.on_read(client, clients.sent_bytes(client), self.now)
        clients.on_sent(client, num_bytes)


@pytest.fixture
def results(tmp_path: Path) -> Iterator[ResultScene]:
    scene = ResultScene(f"ipc://{tmp_path}/m")
    yield scene
    scene.mail.close()
    scene.context.destroy(linger=0)


def test_a_result_is_sent_once_its_client_has_read(results: ResultScene) -> None:
    client = results.greet()
    results.stay_behind(client, MAX_UNREAD_WITH_RESULTS)
    results.compute(client)
    results.send_results()
    assert results.unsent() == {client}
    results.stay_behind(client, MAX_UNREAD_WITH_RESULTS - RESULT_BYTES)
    results.send_results()
    assert results.unsent() == set()
    message = results.next_message()
    assert isinstance(message, Outputs)
    assert [output.finish for output in message.outputs] == ["stop"]


def test_a_client_that_reads_slowly_is_not_dropped_for_its_results(results: ResultScene) -> None:
    client = results.greet()
    results.compute(client)
    for _ in range(9):
        results.stay_behind(client, MAX_UNREAD_WITH_RESULTS)
        results.send_results(after_s=50.0)
    assert results.unsent() == {client}
    assert results.gone == []
    results.send_results(after_s=61.0)
    assert results.gone == [client]


def test_a_stalled_client_is_dropped_soon_if_the_results_of_others_wait_for_it(
    results: ResultScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.connections.clients.MAX_TOTAL_UNREAD_WITH_RESULTS", 1000)
    client, stalled = results.greet(), results.greet(results.connect())
    results.stay_behind(client, 300)
    results.stay_behind(stalled, 700)
    results.compute(client)
    results.send_results()
    results.stay_behind(client, 300)
    results.send_results(after_s=STALLED_S)
    assert (results.gone, results.unsent()) == ([], {client})
    results.now += 0.1
    results.stay_behind(client, 300)
    results.send_results()
    results.send_results()
    assert (results.gone, results.unsent()) == ([stalled], set())


def test_a_stalled_client_is_dropped_soon_if_too_many_results_wait(
    results: ResultScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.encode.unsent_results.MAX_UNSENT_BYTES", 0)
    client = results.greet()
    results.stay_behind(client, MAX_UNREAD_WITH_RESULTS)
    results.compute(client)
    results.send_results(after_s=STALLED_S)
    assert results.gone == []
    results.send_results(after_s=0.1)
    assert results.gone == [client]
