"""Large results of encoding: they wait in the engine until their client has read enough."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol.engine.encoding import MAX_INPUTS, MAX_RESULT_NUMBERS, EncodeInputs
from protocol.engine.messages import Accepted, Encode, Outputs, Ping, Pong, ToClient
from protocol.sdk.client import Client
from protocol.wire.arrays import Int32
from tests.support.processes import ROOT, Program
from tests.support.raw_client import RawClient
from tests.support.waiting import eventually

LEASE_S, SHORT_LEASE_S = 60.0, 3.0
WORKER = ROOT / "tests" / "support" / "vector_worker"
STEPS = 8
"""Steps of the largest request."""


@pytest.fixture
def address(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the address of an engine whose worker gives the largest results. The parameter is its
    `lease_s`."""
    tmp_path.chmod(0o700)
    (tmp_path / "run").mkdir(mode=0o700)
    address = f"ipc://{tmp_path}/run/engine.sock"
    lease_s = getattr(request, "param", LEASE_S)
    config = {"address": address, "lease_s": lease_s, "worker": {"model": "vectors"}}
    command = ["-P", "-m", "engine_core", "--config", json.dumps(config)]
    with Program(command, environment={"PYTHONPATH": f"{WORKER}:{ROOT}"}):
        Client(address, wait_s=60).close()
        yield address


def largest(number: int) -> Encode:
    """Return a request with the largest results. Its numbers are `number`."""
    inputs = EncodeInputs(
        tokens=Int32.of([number] * MAX_INPUTS), lengths=Int32.of([1] * MAX_INPUTS)
    )
    return Encode(request=number, inputs=inputs)


class Reader:
    """A client that answers for what it reads only when the test lets it."""

    def __init__(self, raw: RawClient) -> None:
        raw.greet()
        self.raw = raw
        self.lost = raw.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.results: list[int] = []
        self._read_bytes = 0

    def ask(self, *numbers: int) -> None:
        """Send the largest request some times, and wait until all are accepted."""
        for number in numbers:
            self.raw.send(largest(number))
        for number in numbers:
            while not isinstance(message := self.raw.receive(), Accepted):
                self._keep(message)
            assert message == Accepted(request=number)

    def read(self, num_results: int) -> None:
        """Read as a prompt client does, with a Ping after each Pong, until there are so many
        results."""
        self.raw.send(Ping(read_bytes=self._read_bytes))
        while len(self.results) < num_results:
            message = self.raw.receive()
            self._keep(message)
            if isinstance(message, Pong):
                self._read_bytes = max(self._read_bytes, message.sent_bytes)
                self.raw.send(Ping(read_bytes=self._read_bytes))

    def ping_until_dropped(self) -> None:
        """Send Pings without ever reading, until the engine has ended the connection."""

        def is_dropped() -> bool:
            self.raw.send(Ping())
            return bool(self.lost.poll(0))

        assert eventually(is_dropped, every_s=0.2)

    def _keep(self, message: ToClient) -> None:
        if not isinstance(message, Outputs):
            return
        for output in message.outputs:
            assert (output.finish, output.error) == ("stop", None)
            assert output.vectors is not None
            data = output.vectors.data
            assert data.nbytes == 4 * MAX_RESULT_NUMBERS
            numbers = data.cast("f")
            assert numbers[0] == numbers[-1] == output.request
            self.results.append(output.request)


def test_a_client_that_reads_nothing_for_a_while_gets_all_results(address: str) -> None:
    numbers = [1, 2, 3, 4, 5]
    with Client(address) as other, RawClient(address) as raw:
        reader = Reader(raw)
        reader.ask(*numbers)
        done = STEPS * len(numbers)
        assert eventually(lambda: other.get_status().stats.num_steps >= done)
        reader.read(len(numbers))
    assert sorted(reader.results) == numbers


def test_a_client_that_never_reads_delays_nobody(address: str) -> None:
    with RawClient(address) as raw, RawClient(address) as second:
        never, prompt = Reader(raw), Reader(second)
        # All unsent results together are few enough. More would crowd the engine, and then a client
        # that reads nothing is dropped after STALLED_S, which a slow machine may need for the rest.
        never.ask(*range(1, 6))
        prompt.ask(9, 10, 11)
        prompt.read(3)
        assert sorted(prompt.results) == [9, 10, 11]
        assert not never.lost.poll(0)


@pytest.mark.parametrize("address", [SHORT_LEASE_S], indirect=True)
def test_a_client_that_never_reads_is_dropped_after_its_lease(address: str) -> None:
    with Client(address) as other, RawClient(address) as raw:
        never = Reader(raw)
        never.ask(*range(1, 6))
        never.ping_until_dropped()
        assert eventually(lambda: not other.get_status().num_open)
