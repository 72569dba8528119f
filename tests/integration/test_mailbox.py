"""The engine's end of its clients: nonsense is refused and counted, who does not hear is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine_core.mailbox import Mailbox
from protocol import wire
from protocol.messages import PROTOCOL_VERSION, Hello, Pong, Refused, ToClient, ToEngine
from protocol.stats import EngineStats

WAIT_MS = 10_000
PONG = Pong(epoch="e", stats=EngineStats())
Socket = zmq.Socket[bytes]


class Scene:
    """A mailbox, one client of it, and who was gone."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.gone: list[bytes] = []
        self.mail = Mailbox(self.context, address, None, lease_s=5.0, on_gone=self.gone.append)
        self.client = self.context.socket(zmq.DEALER)
        self.client.connect(address)

    def receive(self, num_frames: int) -> list[tuple[bytes, ToEngine]]:
        """What the mailbox makes of so many messages; one is waited for."""
        found: list[tuple[bytes, ToEngine]] = []
        before = self.mail.num_wire_errors
        while len(found) + self.mail.num_wire_errors - before < num_frames:
            assert self.mail.socket.poll(WAIT_MS), "nothing came"
            found += self.mail.receive(1.0)
        return found

    def told(self) -> ToClient:
        assert self.client.poll(WAIT_MS), "nothing was told"
        return wire.Decoder[ToClient](ToClient).decode(self.client.recv_multipart())

    def greet(self) -> bytes:
        self.client.send_multipart(wire.encode(Hello(protocol=PROTOCOL_VERSION, name="x")))
        ((client, message),) = self.receive(1)
        assert isinstance(message, Hello)
        self.mail.clients.greet(client, 1.0, message.name)
        return client


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(f"ipc://{tmp_path}/m")
    yield scene
    scene.mail.close()
    scene.context.destroy(linger=0)


def test_nonsense_is_refused_and_counted_and_what_follows_is_heard(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        scene.client.send(b"nonsense")
    assert scene.receive(5) == []
    assert scene.mail.num_wire_errors == 5
    refusals = [scene.told() for _ in range(5)]
    assert all(isinstance(told, Refused) and told.request == -1 for told in refusals)
    assert len([r for r in caplog.records if "malformed" in r.message]) == 3  # 1st, 2nd, 4th
    client = scene.greet()
    scene.mail.tell(client, PONG)
    assert scene.told() == PONG
    assert scene.gone == []


def test_who_cannot_be_told_anything_is_gone_once(scene: Scene) -> None:
    client = scene.greet()
    scene.mail.clients.greet(b"left", 1.0, "y")
    scene.mail.tell_everybody(PONG)
    scene.mail.tell(b"left", PONG)
    assert scene.gone == [b"left"]
    assert scene.told() == PONG
    assert scene.mail.clients.all() == [client]


def test_a_stranger_who_cannot_be_told_anything_is_no_news(scene: Scene) -> None:
    scene.mail.tell_each({b"stranger": PONG})
    assert scene.gone == []
