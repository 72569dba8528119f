"""The socket of an engine on a network: TCP, with a cluster's key.

Who has the key says nonsense behind a right handshake, and is refused as on any socket. Who has
none, or another, is not heard: not one of their messages is read, so none is counted. Nor is
anything that is no greeting of ZeroMQ at all. As in `decisions`, the process lives, answers all the
while, does not grow, and does rightly what it is for.
"""

from __future__ import annotations

import socket
import tempfile
from itertools import islice
from pathlib import Path
from random import Random

import zmq

from protocol import messages
from protocol.client import Client
from protocol.cluster_key import ClusterKey, read_cluster_key, write_cluster_key
from protocol.messages import Drain, Profile
from tests.support.processes import free_port
from tests.support.tiny_engine import tiny_engine
from tests.support.waiting import eventually
from tests.torture.fuzz.decisions import answers_rightly, say_to_engine, wire_errors
from tests.torture.fuzz.frames import BATCH, Frames, Nonsense
from tests.torture.fuzz.outcome import PATIENCE_S, Outcome, watched
from tests.torture.fuzz.values import damaged

UNHEARD, GREETINGS = 20, 10
"""Of each batch: messages of one who has no key, of one who has another; connections of one who
does not greet."""
OTHER = ClusterKey(b"another cluster's" * 2)

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = _SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + bytes(32 + 8 + 80)
"""A command of 200 bytes: rfc.zeromq.org/spec/26."""
_NULL = _SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def cluster(count: int, seed: int) -> Outcome:
    """By whoever reaches its port."""
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
                    said = list(islice(nonsense, BATCH - 2 * UNHEARD - GREETINGS))
                    batch = [frames for frames, _ in said]
                    say_to_engine(address, batch, key)
                    _say_unheard(address, batch[:UNHEARD], None)
                    _say_unheard(address, batch[-UNHEARD:], OTHER)
                    for _ in range(GREETINGS):
                        _greet_wrongly(address, chance)
                    outcome.senseless += sum(message is None for _, message in said)
                    outcome.sent += BATCH
                    answers_rightly(polite)
                    if outcome.sent <= max(count // 10, BATCH):
                        is_warm()
            outcome.counted = wire_errors(address, key) - before
            assert outcome.counted == outcome.senseless, outcome
            assert eventually(lambda: polite.stats.running == 0, within_s=PATIENCE_S)
            assert polite.stats.free_blocks == polite.stats.total_blocks
    return outcome


def _say_unheard(address: str, batch: list[Frames], key: ClusterKey | None) -> None:
    """Until the engine has closed the connection on one without the right key."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    if key is not None:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, key.server.public)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, key.client.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, key.client.secret)
    hung_up = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | _FAILED)
    dealer.connect(address)
    for frames in batch:
        dealer.send_multipart(frames)
    assert hung_up.poll(int(PATIENCE_S * 1000)), f"who has the key {key} is not hung up on"
    assert not dealer.poll(0)
    dealer.disable_monitor()
    hung_up.close()
    context.destroy(linger=0)


def _greet_wrongly(address: str, chance: Random) -> None:
    """Until the engine has closed the connection."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    what = chance.random()
    if what < 0.2:
        said = chance.randbytes(chance.choice([1, 12, 64, 5000]))
    else:
        said = chance.choice([_GREETING, _NULL, _GREETING + _HELLO, _NULL + _HELLO])
        for _ in range(chance.choice([0, 1, 1, 3])):
            said = damaged(said, chance)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except TimeoutError:
            raise
        except OSError:  # it has seen enough, and hung up before we had said all
            pass
