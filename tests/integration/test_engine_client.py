"""The gateway's engine client without a gateway, in the gevent hub of the test process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import gevent
import pytest

from gateway.engine.base import EngineClient, Report
from gateway.engine.client import ZmqEngineClient
from gateway.fleet.disaggregated import DisaggregatedClient
from gateway.fleet.engine_fleet import FleetOptions
from gateway.fleet.engine_list import EngineList
from gateway.fleet.replicas import ReplicatedClient
from protocol.engine.messages import Output
from protocol.engine.sampling import SamplingParams
from protocol.engine.session import Session
from tests.support.scripted_engine import ScriptedEngine, TokenReply
from tests.support.waiting import eventually

STEPS = 700


def run_hub_until(claim: Callable[[], bool]) -> None:
    assert eventually(claim, pause=gevent.sleep)


def test_a_busy_client_gets_all_outputs_in_fewer_pieces(tmp_path: Path) -> None:
    said = {n: [[n * 1000 + step] for step in range(STEPS)] for n in (1, 2)}
    address = f"ipc://{tmp_path / 'engine.sock'}"
    with (
        ScriptedEngine(address, step_s=0.0) as engine,
        contextlib.closing(ZmqEngineClient(address)) as client,
    ):
        engine.script = lambda generate: TokenReply(said[generate.request], "length", None)
        engine.is_paused = True
        client.session = Session("busy", lease_s=600)
        client.start()
        run_hub_until(lambda: client.is_ready)
        received: dict[int, list[Report]] = {1: [], 2: []}
        for n in received:
            assert client.generate([1, 2, 3], SamplingParams(), received[n].append) == n
        run_hub_until(lambda: all(received.values()))  # accepted
        engine.is_paused = False
        engine.await_idle(timeout_s=60)  # the hub does not run meanwhile
        run_hub_until(lambda: not client.session.open)
    for n, (_, *outputs) in received.items():
        assert all(isinstance(output, Output) for output in outputs)
        assert [t for o in outputs for t in o.tokens] == [t for step in said[n] for t in step]  # type: ignore[union-attr]
        assert [o.finish for o in outputs if o.finish] == ["length"]  # type: ignore[union-attr]
        assert len(outputs) < STEPS


FLEET = FleetOptions(failover_s=0.0, on_routed=lambda reason: None, on_moved=lambda cause: None)


def one_engine(a: str, b: str) -> EngineClient:
    return ZmqEngineClient(a)


def replicas(a: str, b: str) -> EngineClient:
    return ReplicatedClient(EngineList([a, b]), ZmqEngineClient, FLEET)


def split_server(a: str, b: str) -> EngineClient:
    return DisaggregatedClient(
        EngineList([a]),
        EngineList([b]),
        ZmqEngineClient,
        FLEET,
        min_tokens=2,
        recomputes=False,
        on_handover=lambda: None,
        on_fallback=lambda cause: None,
    )


@pytest.mark.parametrize("new_client", [one_engine, replicas, split_server])
def test_engines_that_have_exited_get_no_request_though_their_connections_stay(
    new_client: Callable[[str, str], EngineClient], tmp_path: Path
) -> None:
    addresses = [f"ipc://{tmp_path / name}" for name in "ab"]
    with (
        ScriptedEngine(addresses[0]) as a,
        ScriptedEngine(addresses[1]) as b,
        contextlib.closing(new_client(*addresses)) as client,
    ):
        client.start()
        run_hub_until(lambda: all(each.client.is_ready for each in client.connections))
        assert client.trouble() is None
        a.is_silent = b.is_silent = True
        client.on_exited()
        trouble = client.trouble()
        assert trouble is not None
        assert trouble.message == "the engine has exited"
        assert not any(each.client.is_ready for each in client.connections)
        a.is_silent = b.is_silent = False
        run_hub_until(lambda: all(each.client.is_ready for each in client.connections))
        run_hub_until(lambda: client.is_ready)
