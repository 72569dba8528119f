"""`python -m tests.torture.spin`: checks for processes that spin and for messages that are missed.

    clients of an engine     each is killed in the middle of its answer
    engines of a gateway     each is killed in the middle of an answer; another takes its place
    messages to a gateway    a million. ZeroMQ signals its descriptor once for many messages, so a
                             gateway that does not read all of them would wait for ever
    messages to an engine    a million heartbeats, of which each must be answered

After the kills, the processes that are left must be idle. That is measured as their own CPU time,
so other processes of the machine do not matter.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import Any, Literal

import psutil
import requests
import zmq

from protocol.engine.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Generate,
    Hello,
    Limits,
    Output,
    Outputs,
    Ping,
    Pong,
    Probe,
    ToEngine,
    Welcome,
)
from protocol.engine.stats import EngineStats
from protocol.sdk.client import Client
from protocol.wire import codec, sockets
from tests.support.gateway_process import GatewayProcess
from tests.support.processes import ROOT, Program, descendants_of
from tests.support.raw_client import RawClient
from tests.support.scripted_engine import ScriptedEngine, scripted_card, text_reply
from tests.support.tiny_engine import tiny_engine
from tests.support.waiting import eventually

IDLE_CPU = 0.02
WINDOW_S, TRIES = 2.0, 5
PATIENCE_S = 120.0
AT_A_TIME = 10
LEASE_S = 1.5
CONTEXT = 65_536
LIMITS = Limits(
    max_len=1 << 24,
    max_slots=8,
    block_tokens=16,
    num_blocks=64,
    token_budget=256,
    prefix_cache=True,
)


def idle_cpu(pids: Sequence[int]) -> float:
    """Return the share of a core that the busiest of these processes uses. The share of a process
    is the least of a few measurements, because the last messages may still keep it busy for a
    moment."""
    best = dict.fromkeys(pids, float("inf"))
    for _ in range(TRIES):
        before = {pid: _cpu_s(pid) for pid in pids}
        began = time.monotonic()
        time.sleep(WINDOW_S)
        took_s = time.monotonic() - began
        for pid in pids:
            best[pid] = min(best[pid], (_cpu_s(pid) - before[pid]) / took_s)
        if max(best.values()) < IDLE_CPU:
            break
    return max(best.values())


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


# ---- peers that are killed


def clients_killed(count: int) -> float:
    """Kill `count` clients of an engine. Return the CPU share that the busier one of the engine and
    its worker uses afterwards."""
    with tiny_engine(context_tokens=CONTEXT, lease_s=LEASE_S) as (program, address):
        engine = program.process.pid
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            list(pool.map(_run_and_kill_client, [address] * count))
        with Client(address) as client:
            gone = eventually(lambda: client.get_status().stats.clients == 1, within_s=PATIENCE_S)
            stats = client.get_status().stats
            assert gone, f"{stats.clients} clients are left"
            assert stats.running == stats.waiting == 0
            assert stats.num_finished["abort"] == stats.num_accepted - _others(stats)
        return idle_cpu([engine, *(pid for pid, _ in descendants_of(engine))])


def _others(stats: EngineStats) -> int:
    return sum(count for why, count in stats.num_finished.items() if why != "abort")


def _run_and_kill_client(address: str) -> None:
    with Program(["-m", "tests.torture.spin", "--be-client", address]) as client:
        client.line_with("receives", timeout_s=PATIENCE_S)
        client.signal(signal.SIGKILL)


def be_client(address: str) -> None:
    """Read an answer that is too long to finish. `_run_and_kill_client` kills this process."""
    with Client(address, wait_s=PATIENCE_S) as engine:
        for number, _ in enumerate(engine.generate([3], max_tokens=CONTEXT - 8, ignore_eos=True)):
            if number == 2:
                print("receives", flush=True)
    time.sleep(PATIENCE_S)


def engines_killed(count: int) -> float:
    """Stop `count` engines of a gateway, each during an answer. Return the CPU share that the
    busier one of the gateway's processes uses afterwards, with one more engine."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine.sock"
        config: dict[str, Any] = {
            "engine": address,
            "response_store": "none",
            "log_requests": False,
        }
        with GatewayProcess(**config) as gateway, ThreadPoolExecutor(1) as pool:
            for _ in range(count):
                with ScriptedEngine(address, step_s=0.05) as engine:
                    engine.script = lambda generate: text_reply("on and on " * 500)
                    gateway.await_ready()
                    asked = pool.submit(_ask, gateway)
                    engine.await_generates(1, PATIENCE_S)
                assert asked.result(PATIENCE_S) in (500, 502, 503), "not reported as lost"
            with ScriptedEngine(address):
                gateway.await_ready()
                assert _ask(gateway) == 200
                pid = requests.get(gateway.url + "/readyz", timeout=20).json()["gateway"]["pid"]
                return idle_cpu([pid, gateway.process.pid])


def _ask(gateway: GatewayProcess) -> int:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}
    url = gateway.url + "/v1/chat/completions"
    return requests.post(url, json=body, timeout=PATIENCE_S).status_code


# ---- messages


def messages_to_gateway(count: int, seed: int = 1) -> None:
    """Send messages to the gateway's engine client, in bursts and with random pauses. Raises
    AssertionError if a message is missing or out of order."""
    with tempfile.TemporaryDirectory() as folder, _router(f"ipc://{folder}/engine") as router:
        command = ["-m", "tests.torture.spin", "--be-gateway", f"ipc://{folder}/engine"]
        with Program([*command, "--messages", str(count)]) as program:
            _send_all(router, count, Random(seed), program.process.poll)
            program.line_with("all received", timeout_s=PATIENCE_S)


@contextmanager
def _router(address: str) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield sockets.bind_router(context, address)
    finally:
        context.destroy(linger=0)


def _send_all(
    router: zmq.Socket[bytes], count: int, chance: Random, has_ended: Callable[[], object]
) -> None:
    """Send `count` messages of one token each, in bursts. Answer the client's own messages after
    each burst."""
    client, request = _await_request(router)
    sent = 0
    while sent < count:
        for _ in range(min(count - sent, chance.choice([1, 1, 2, 63, 64, 65, 128, 1000]))):
            sent += 1
            finish: Literal["length"] | None = "length" if sent == count else None
            output = Output(request=request, tokens=[sent], finish=finish)
            router.send_multipart([client, *codec.encode(Outputs(step=sent, outputs=[output]))])
        _answer_waiting(router)
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.002)
        assert has_ended() is None


def _await_request(router: zmq.Socket[bytes]) -> tuple[bytes, int]:
    """Wait for a Generate, and accept it. Return (client, number of the request)."""
    while True:
        assert router.poll(int(PATIENCE_S * 1000))
        client, message = _receive(router)
        if isinstance(message, Generate):
            router.send_multipart([client, *codec.encode(Accepted(request=message.request))])
            return client, message.request
        _answer(router, client, message)


def _receive(router: zmq.Socket[bytes]) -> tuple[bytes, ToEngine]:
    decoder: codec.Decoder[ToEngine] = codec.Decoder(ToEngine)
    client, *frames = router.recv_multipart()
    return client, decoder.decode(frames)


def _answer_waiting(router: zmq.Socket[bytes]) -> None:
    while router.poll(0):
        _answer(router, *_receive(router))


def _answer(router: zmq.Socket[bytes], client: bytes, message: ToEngine) -> None:
    if isinstance(message, Hello):
        welcome = Welcome(
            protocol=PROTOCOL_VERSION, epoch="e", model=scripted_card(), limits=LIMITS
        )
        router.send_multipart([client, *codec.encode(welcome)])
    elif isinstance(message, Ping):
        router.send_multipart([client, *codec.encode(Pong(epoch="e", stats=EngineStats()))])


def be_gateway(address: str, count: int) -> None:
    """Request an answer of `count` tokens, and check that all of them arrive in order. This process
    is the gateway of `messages_to_gateway`."""
    import gevent
    from gevent.event import Event

    from gateway.engine.client import ZmqEngineClient
    from protocol.engine.sampling import SamplingParams

    client, ended, received = ZmqEngineClient(address), Event(), 0

    def receive(report: object) -> None:
        nonlocal received
        if isinstance(report, Output):
            assert report.error is None, report.error
            assert report.tokens == list(range(received + 1, received + 1 + len(report.tokens)))
            received += len(report.tokens)
            if report.finish is not None:
                ended.set()

    client.start()
    while not client.is_ready:
        gevent.sleep(0.01)
    client.generate([1], SamplingParams(max_tokens=count), receive)
    ended.wait()
    assert received == count
    print("all received", flush=True)
    client.close()


def messages_to_engine(count: int) -> None:
    """Send heartbeats as fast as possible. Raises zmq.Again if an answer is missing, and
    AssertionError if there are more answers than heartbeats."""
    with tiny_engine() as (_, address), RawClient(address) as client:
        client.greet()
        sent = num_pongs = 0
        while num_pongs < count:
            for _ in range(min(1000, count - sent)):
                client.send(Ping())
                sent += 1
            num_pongs += isinstance(client.receive_any(), Pong)
            while num_pongs < sent and (sent == count or client.socket.poll(0)):
                # A probe may be all that there is to read, so it is not skipped.
                num_pongs += isinstance(client.receive_any(), Pong)
        while client.socket.poll(500):
            assert isinstance(client.receive_any(), Probe), "more answers than pings"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.spin", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="number of clients to kill")
    parser.add_argument(
        "--messages", type=int, default=1_000_000, help="number of messages to exchange"
    )
    parser.add_argument("--be-client", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--be-gateway", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be_client:
        be_client(options.be_client)
        return 0
    if options.be_gateway:
        be_gateway(options.be_gateway, options.messages)
        return 0
    return _report(options.kills, options.messages)


def _report(kills: int, messages: int) -> int:
    shares = []
    for killed, kill in (("clients of an engine", clients_killed), ("engines", engines_killed)):
        started_at = time.monotonic()
        shares.append(kill(kills))
        took_s = time.monotonic() - started_at
        print(f"{kills} {killed} killed: idle CPU {shares[-1]:.2%} ({took_s:.0f} s)", flush=True)
    for receiver, send in (("a gateway", messages_to_gateway), ("an engine", messages_to_engine)):
        started_at = time.monotonic()
        send(messages)
        rate = messages / (time.monotonic() - started_at)
        print(f"{messages:,} messages to {receiver}: none missed ({rate:,.0f}/s)", flush=True)
    return int(max(shares) >= IDLE_CPU)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
