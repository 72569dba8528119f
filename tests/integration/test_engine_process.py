"""The engine_core process with a real worker and a tiny model: its messages, and the ways in which
it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine_core.connections.clients import MAX_UNREAD_BYTES
from protocol.engine.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Generate,
    Goodbye,
    Hello,
    Loading,
    Output,
    Outputs,
    Ping,
    Pong,
    Refused,
    SessionLost,
    Welcome,
)
from protocol.engine.sampling import SamplingParams
from protocol.engine.session import Session
from protocol.process.exit_codes import ExitCode
from protocol.sdk.client import Client
from protocol.wire.arrays import Int32
from protocol.wire.errors import (
    ContextTooLong,
    Draining,
    EngineLost,
    EngineNotReady,
    InvalidRequest,
    ServingError,
)
from protocol.wire.sockets import ADAPTERS_SUFFIX
from protocol.worker.steps import StepResult, WorkerFailed
from tests.support.engine_view import is_free
from tests.support.processes import Program, descendants_of, is_alive
from tests.support.raw_client import RawClient
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.waiting import HANG_S, eventually

LEASE_S = 3.0
NO_RESULT: dict[str, Any] = {"step": 1, "tokens": Int32.of([]), "failed": Int32.of([])}


class EngineProcess:
    """An engine_core and its worker."""

    def __init__(self, program: Program, address: str) -> None:
        self.program = program
        self.address = address

    @property
    def worker_pid(self) -> int:
        found = descendants_of(self.program.process.pid)
        (pid,) = [pid for pid, words in found if "-m worker" in words]
        return pid


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2000)


def start(checkpoint: Path, directory: Path, lease_s: float = LEASE_S, **worker: object) -> Program:
    config = {
        "address": f"ipc://{directory}/run/engine.sock",
        "lease_s": lease_s,
        "token_budget": 64,
        "max_waiting": 64,
        "worker": {
            "model": str(checkpoint),
            "dtype": "float32",
            "poison_slots": "wild",
            "max_slots": 8,
            "kv_blocks": 257,
            "threads": 1,
            **worker,
        },
    }
    (directory / "run").mkdir(mode=0o700)
    directory.chmod(0o700)
    return Program(["-P", "-m", "engine_core", "--config", json.dumps(config)])


@pytest.fixture(scope="module")
def shared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Yield an engine for tests that leave it unchanged."""
    directory = tmp_path_factory.mktemp("shared")
    with start(checkpoint, directory) as program:
        yield EngineProcess(program, f"ipc://{directory}/run/engine.sock")


@pytest.fixture
def own(checkpoint: Path, tmp_path: Path) -> Iterator[EngineProcess]:
    """Yield an engine for a test that ends it."""
    with start(checkpoint, tmp_path) as program:
        yield EngineProcess(program, f"ipc://{tmp_path}/run/engine.sock")


def connect(process: EngineProcess) -> Client:
    return Client(process.address, wait_s=60)


@pytest.fixture
def raw(shared: EngineProcess) -> Iterator[RawClient]:
    connect(shared).close()  # wait until it is ready
    with RawClient(shared.address) as client:
        yield client


def test_a_worker_asks_for_huge_pages(shared: EngineProcess) -> None:
    connect(shared).close()  # wait until it is ready
    variables = Path(f"/proc/{shared.worker_pid}/environ").read_text().split("\0")
    assert [each for each in variables if "glibc.malloc.hugetlb=1" in each]


def a_generate(request: int, max_tokens: int = 1000) -> Generate:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Generate(request=request, prompt=Int32.of([5, 6]), params=params)


def test_many_threads_get_each_their_own_answer(shared: EngineProcess) -> None:
    with connect(shared) as engine:

        def ask(number: int) -> list[int]:
            bias = {number: 100.0}
            answer = engine.generate([3], max_tokens=20, logit_bias=bias, ignore_eos=True)
            return answer.tokens()

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(10, 42)))
    assert answers == [[number] * 20 for number in range(10, 42)]


def test_a_refusal_is_raised_with_its_own_type(shared: EngineProcess) -> None:
    with connect(shared) as engine:
        with pytest.raises(ContextTooLong, match="tokens"):
            engine.generate([1] * 100_000).tokens()
        with pytest.raises(InvalidRequest, match="vocabulary"):
            engine.generate([1 << 30]).tokens()
        with pytest.raises(InvalidRequest, match="temperature"):
            engine.generate([1], temperature=9)


def test_a_malformed_frame_is_answered_and_counted_and_nothing_else(raw: RawClient) -> None:
    raw.socket.send_multipart([b"\x01nonsense"])
    refused = raw.receive()
    assert isinstance(refused, Refused)
    assert (refused.request, refused.error.code) == (-1, "wire")
    raw.greet()
    raw.send(Ping())
    pong = raw.receive()
    assert isinstance(pong, Pong)
    assert pong.stats.num_wire_errors >= 1


def test_generate_before_hello_is_refused(raw: RawClient) -> None:
    raw.send(a_generate(1))
    refused = raw.receive()
    assert isinstance(refused, Refused)
    assert "restarted" in refused.error.message


def test_an_unknown_client_is_asked_to_greet_again(raw: RawClient) -> None:
    raw.send(Ping())
    assert raw.receive() == SessionLost(why="the connection to the engine broke")


def test_a_second_hello_forgets_what_was_open(raw: RawClient) -> None:
    raw.greet()
    raw.send(a_generate(1))
    assert raw.receive_kind(Accepted) == Accepted(request=1)
    raw.greet()
    raw.send(a_generate(1, max_tokens=2))
    assert raw.receive_kind(Accepted) == Accepted(request=1)
    tokens = 0
    while True:
        outputs = raw.receive_kind(Outputs)
        assert isinstance(outputs, Outputs)
        tokens += sum(len(output.tokens) for output in outputs.outputs)
        if outputs.outputs[0].finish:
            break
    assert tokens == 2


def test_a_goodbye_frees_all_of_a_clients_requests(shared: EngineProcess, raw: RawClient) -> None:
    raw.greet()
    for number in range(5):
        raw.send(a_generate(number))
    raw.receive_kind(Outputs)
    raw.send(Goodbye())
    with connect(shared) as engine:
        assert eventually(lambda: is_free(engine.stats))


def test_a_client_that_falls_silent_loses_its_requests(
    shared: EngineProcess, raw: RawClient
) -> None:
    raw.greet()
    for number in range(20):
        raw.send(a_generate(number))
    with connect(shared) as engine:
        assert eventually(lambda: engine.stats.running + engine.stats.waiting > 0)
        assert eventually(lambda: is_free(engine.stats))
        assert eventually(lambda: engine.stats.clients == 1)


def test_sigterm_finishes_open_requests_refuses_new_ones_and_exits_0(own: EngineProcess) -> None:
    with connect(own) as engine:
        answer = engine.generate([5], max_tokens=300, ignore_eos=True)
        first: Output = next(answer)
        own.program.signal(signal.SIGTERM)
        refusals: list[ServingError] = []

        def try_again() -> bool:
            try:
                engine.generate([5], max_tokens=1).tokens()
            except (Draining, EngineLost, EngineNotReady) as error:
                refusals.append(error)
            return bool(refusals)

        assert eventually(try_again)
        assert len(first.tokens) + len(answer.tokens()) == 300
    assert own.program.end() == 0
    assert isinstance(refusals[0], Draining)


def test_sigquit_ends_open_requests_with_an_error_and_exits_0(own: EngineProcess) -> None:
    with connect(own) as engine:
        answer = engine.generate([5], max_tokens=1900, ignore_eos=True)
        next(answer)
        own.program.signal(signal.SIGQUIT)
        with pytest.raises(EngineLost, match="another process of its server failed"):
            answer.tokens()
    assert own.program.end() == ExitCode.OK


def test_a_killed_worker_is_reported_at_once_and_by_exit_code_3(own: EngineProcess) -> None:
    with connect(own) as engine:
        answer = engine.generate([5], max_tokens=1000, ignore_eos=True)
        next(answer)
        killer = threading.Timer(0.05, os.kill, (own.worker_pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(EngineLost, match="killed by SIGKILL"):  # not: "has been silent"
            answer.tokens()
    assert own.program.end() == ExitCode.WORKER_LOST
    # A thread that compiles grammars may log its own line after the cause.
    assert any("killed by SIGKILL" in line for line in own.program.err)


def test_a_killed_engine_is_noticed_and_leaves_no_worker(own: EngineProcess) -> None:
    with connect(own) as engine:
        answer = engine.generate([5], max_tokens=1000, ignore_eos=True)
        next(answer)
        worker = own.worker_pid
        own.program.process.kill()
        with pytest.raises(EngineLost, match="connection"):  # not: "has been silent"
            answer.tokens()
        assert eventually(lambda: not is_alive(worker))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL])
def test_an_engine_without_a_supervisor_keeps_its_adapters_for_the_next_only_if_it_crashes(
    checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Its shell or service manager starts the next one, so that one has the same parent."""
    with start(checkpoint, tmp_path, lora_dir=str(tmp_path)) as program:
        process = EngineProcess(program, f"ipc://{tmp_path}/run/engine.sock")
        connect(process).close()
        file = tmp_path / "run" / f"engine.sock.worker{ADAPTERS_SUFFIX}"
        assert file.exists()
        program.signal(number)
        program.end()
        assert file.exists() == (number is signal.SIGKILL)


def test_a_missing_model_is_reported_in_one_line_with_its_exit_code(tmp_path: Path) -> None:
    with start(tmp_path / "no-such-model", tmp_path) as program:
        assert program.end(timeout_s=60) == ExitCode.BAD_MODEL
        assert "no-such-model" in program.err[-1]


def test_a_slow_client_that_repeats_its_hello_gets_one_welcome(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Eight Welcomes with this tokenizer would exceed the limit of unread bytes."""
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path)
    tokenizer = path / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b" " * (MAX_UNREAD_BYTES // 6))
    with ExitStack() as stack:
        process = EngineProcess(
            stack.enter_context(start(path, tmp_path)), f"ipc://{tmp_path}/run/engine.sock"
        )
        connect(process).close()  # it is ready
        client = stack.enter_context(RawClient(process.address))
        session = Session("slow")
        session.on_connected()
        for second in range(8):
            (hello,), _ = session.tick(float(second))
            client.send(hello)
        received = [client.receive()]
        session.receive(received[0], 8.0)
        assert session.is_ready
        client.send(session.generate([3], SamplingParams(max_tokens=2, ignore_eos=True)))
        while not isinstance(received[-1], Accepted):
            received.append(client.receive())
        assert [type(each) for each in received] == [Welcome, Accepted]
        assert not any("dropping client" in line for line in process.program.err)


def test_a_client_that_lost_its_session_gets_another_welcome(raw: RawClient) -> None:
    for number in range(3):
        raw.send(Hello(protocol=PROTOCOL_VERSION, num_welcomes=number))
        assert isinstance(raw.receive(), Welcome)


def test_any_client_can_abort_a_request_by_its_label(shared: EngineProcess) -> None:
    with connect(shared) as engine, connect(shared) as other:
        labels = ["job-1", "chat-job-1"]
        long = engine.generate([5, 6], max_tokens=1500, ignore_eos=True, labels=labels)
        assert next(long).tokens
        result = other.abort_by_label(["chat-job-1", "job-2"])
        assert (result.aborted, result.unknown) == (["chat-job-1"], ["job-2"])
        assert [output.finish for output in long][-1] == "abort"
        assert other.abort_by_label(["job-1"]).unknown == ["job-1"]
        assert eventually(lambda: engine.stats.free_blocks == engine.stats.total_blocks)


def test_messages_of_a_stranger_on_the_workers_socket_are_ignored(shared: EngineProcess) -> None:
    connect(shared).close()
    with RawClient(shared.address + ".worker") as stranger, connect(shared) as engine:
        for message in (WorkerFailed(message="I am the worker"), StepResult(**NO_RESULT)):
            stranger.send(message)
        stranger.socket.send_multipart([b"\x01nonsense"])
        assert eventually(lambda: engine.stats.num_wire_errors >= 3)
        assert engine.generate([3], max_tokens=2, ignore_eos=True).tokens()


def test_the_clients_that_wait_for_the_model_are_logged_in_one_line(
    checkpoint: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        # These clients send nothing while the model is loaded, for as long as that takes.
        program = stack.enter_context(start(checkpoint, tmp_path, lease_s=HANG_S))
        address = f"ipc://{tmp_path}/run/engine.sock"
        clients = [stack.enter_context(RawClient(address)) for _ in range(4)]
        for name, client in zip(("first", "gives up", "second"), clients[:3], strict=True):
            client.send(Hello(protocol=PROTOCOL_VERSION, name=name))
            assert isinstance(client.receive(), Loading)
        clients[1].send(Goodbye())
        for client in (clients[0], clients[2]):
            assert isinstance(client.receive_kind(Welcome), Welcome)
        clients[3].greet()
        assert eventually(lambda: any("is raw, pid" in line for line in program.err))
        logged = [line for line in program.err if "INFO client" in line]
    assert len(logged) == 2, logged
    waited = r"INFO clients that waited for the model: first \(\w+\), second \(\w+\)$"
    assert re.search(waited, logged[0])
