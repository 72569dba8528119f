"""Sends malformed messages to an engine's TCP socket, which requires a cluster key.

- A client with the right key passes the handshake. Its malformed messages are refused and counted,
  as on any socket.
- A client with another key or none is disconnected. Its messages are not read, so not counted.
- Bytes that are not a ZeroMQ greeting are not counted either.

The engine must pass the same checks as in `decisions`.
"""

from __future__ import annotations

import socket
import tempfile
from itertools import islice
from pathlib import Path
from random import Random

import zmq

from protocol.engine import messages
from protocol.engine.messages import Drain, Profile
from protocol.sdk.client import Client
from protocol.wire.cluster_key import ClusterKey, read_cluster_key, write_cluster_key
from tests.support.engine_view import is_free
from tests.support.ports import free_port
from tests.support.tiny_engine import tiny_engine
from tests.support.waiting import eventually
from tests.torture.fuzz.decisions import check_answer, send_to_engine, wire_errors
from tests.torture.fuzz.frames import BATCH, Frames, Nonsense
from tests.torture.fuzz.outcome import PATIENCE_S, Outcome, watched
from tests.torture.fuzz.values import damaged

NUM_UNREAD = 20
"""Messages of each batch that are sent again without a key. As many others are sent again with
another cluster's key."""
NUM_BAD_GREETINGS = 10
"""Connections in each batch that send random bytes or a damaged ZeroMQ greeting."""
OTHER = ClusterKey(b"another cluster's" * 2)

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = _SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + bytes(32 + 8 + 80)
"""The HELLO command of CURVE, 200 bytes: rfc.zeromq.org/spec/26."""
_NULL = _SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def cluster(count: int, seed: int) -> Outcome:
    """Send malformed messages to the engine's port: with the right key, with another key, and
    without a key."""
    outcome = Outcome("engine, over a network")
    chance = Random(seed)
    address = f"tcp://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "cluster.key")
        write_cluster_key(path)
        key = read_cluster_key(path)
        assert key is not None
        with (
            tiny_engine(address=address, cluster_key=path) as (program, _),
            Client(address, cluster_key=path) as polite,
        ):
            before = wire_errors(address, key)
            with watched(outcome, lambda: program.process.pid) as is_warm:
                nonsense = iter(Nonsense(messages.ToEngine, chance, never=(Drain, Profile)))
                while outcome.sent < count:
                    drawn = list(islice(nonsense, BATCH - 2 * NUM_UNREAD - NUM_BAD_GREETINGS))
                    batch = [frames for frames, _ in drawn]
                    send_to_engine(address, batch, key)
                    _send_unread(address, batch[:NUM_UNREAD], None)
                    _send_unread(address, batch[-NUM_UNREAD:], OTHER)
                    for _ in range(NUM_BAD_GREETINGS):
                        _send_bad_greeting(address, chance)
                    outcome.malformed += sum(message is None for _, message in drawn)
                    outcome.sent += BATCH
                    check_answer(polite)
                    if outcome.sent <= max(count // 10, BATCH):
                        is_warm()
            outcome.counted = wire_errors(address, key) - before
            assert outcome.counted == outcome.malformed, outcome
            assert eventually(lambda: is_free(polite.stats), within_s=PATIENCE_S)
    return outcome


def _send_unread(address: str, batch: list[Frames], key: ClusterKey | None) -> None:
    """Send the batch with a wrong key or none, and wait until the engine ends the connection."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        if key is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, key.server.public)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, key.client.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, key.client.secret)
        disconnected = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | _FAILED)
        dealer.connect(address)
        for frames in batch:
            dealer.send_multipart(frames)
        assert disconnected.poll(int(PATIENCE_S * 1000)), f"still connected with the key {key}"
        assert not dealer.poll(0)
        dealer.disable_monitor()
        disconnected.close()
    finally:
        context.destroy(linger=0)


def _send_bad_greeting(address: str, chance: Random) -> None:
    """Send random bytes or a ZeroMQ greeting, which is damaged in most cases. Wait until the engine
    closes the connection."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if chance.random() < 0.2:
        data = chance.randbytes(chance.choice([1, 12, 64, 5000]))
    else:
        data = chance.choice([_GREETING, _NULL, _GREETING + _HELLO, _NULL + _HELLO])
        for _ in range(chance.choice([0, 1, 1, 3])):
            data = damaged(data, chance)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except TimeoutError:
            raise
        except OSError:  # the engine closed the connection before all was sent
            pass
