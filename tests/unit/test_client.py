"""The blocking client library, at the end of its connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol import session, sockets, wire
from protocol.client import Client
from protocol.errors import EngineNotReady
from protocol.messages import Goodbye, Hello, ToEngine
from tests.support.processes import HANG_S

QUIET_MS = 300


@pytest.fixture
def address(tmp_path: Path) -> str:
    (tmp_path / "run").mkdir(mode=0o700)
    return f"ipc://{tmp_path}/run/engine.sock"


def sent_to(router: zmq.Socket[bytes]) -> Iterator[ToEngine]:
    """Yield what has come, until nothing does for a while after the first."""
    decoder: wire.Decoder[ToEngine] = wire.Decoder(ToEngine)
    timeout_ms = int(HANG_S * 1000)
    while router.poll(timeout_ms):
        _, *frames = router.recv_multipart()
        yield decoder.decode(frames)
        timeout_ms = QUIET_MS


def test_a_client_that_gives_up_says_nothing_after_its_goodbye(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PING_EVERY_S", 0.0)  # each tick greets
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = sockets.bind_router(context, address)
    with pytest.raises(EngineNotReady):
        Client(address, wait_s=0)
    *greetings, last = sent_to(router)
    context.destroy(linger=0)
    assert {type(message) for message in greetings} == {Hello}
    assert isinstance(last, Goodbye)
