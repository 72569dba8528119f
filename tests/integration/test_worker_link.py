"""The engine's connection to a group of two workers, which the tests play over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine_core.workers.link import WorkerLink
from engine_core.workers.process import WorkerLost
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.kv_window import KVGroups
from protocol.process.exit_codes import ExitCode
from protocol.wire import codec, sockets
from protocol.wire.arrays import Int32
from protocol.wire.cluster_key import ClusterKey
from protocol.worker.ranks import DIGEST_STEPS, TokenDigest
from protocol.worker.steps import (
    FromWorker,
    Heartbeat,
    JoinRefused,
    Masks,
    StepResult,
    Stop,
    TokenizerRead,
    ToWorker,
    WorkerFailed,
    WorkerJoins,
    WorkerReady,
    WorkerSettings,
)
from tests.support.engines import a_card
from tests.support.plans import step_plan
from tests.support.ports import free_port
from tests.support.waiting import HANG_S, eventually

KEY = ClusterKey(b"k" * 32)
READY = WorkerReady(
    model=a_card(), max_len=512, max_slots=8, token_budget=96, block_tokens=16, num_blocks=33
)
TOKENIZER = TokenizerRead(tokenizer=b"{}", vocab_size=5, eos_token_ids=[2])
RESULT = StepResult(step=1, tokens=Int32.of([4]), failed=Int32.of([]))


@dataclass
class Rank:
    """A worker that a test plays."""

    socket: zmq.Socket[bytes]

    def send(self, message: FromWorker) -> None:
        self.socket.send_multipart(codec.encode(message))

    def receive(self) -> ToWorker:
        """Return the next message, except heartbeats."""
        while True:
            assert self.socket.poll(int(HANG_S * 1000)), "nothing received"
            message = codec.Decoder[Any](ToWorker).decode(self.socket.recv_multipart())
            if not isinstance(message, Heartbeat):
                return message


@dataclass
class Scene:
    """A link that waits for two workers of other machines."""

    context: zmq.Context[zmq.Socket[bytes]]
    link: WorkerLink
    address: str
    workers: list[Rank] = field(default_factory=list)

    def connect(self, key: ClusterKey = KEY) -> Rank:
        self.workers.append(Rank(sockets.connect_dealer(self.context, self.address, key)))
        return self.workers[-1]

    def join(self, wanted: int = -1) -> Rank:
        """Connect a worker that is admitted."""
        rank = self.connect()
        rank.send(WorkerJoins(rank=wanted))
        assert self.receives_nothing_until(rank)
        assert isinstance(rank.receive(), WorkerSettings)
        return rank

    def receives_nothing_until(self, rank: Rank) -> bool:
        """Read the link's socket until the worker has an answer."""

        def has_answer() -> bool:
            assert self.link.receive() is None
            return bool(rank.socket.poll(0))

        return eventually(has_answer)

    def receive(self) -> object:
        """Return the next message for the engine."""
        return eventually(self.link.receive)

    def lose(self) -> WorkerLost:
        """Wait until the link raises WorkerLost, and return it."""
        lost: list[WorkerLost] = []

        def is_lost() -> bool:
            try:
                self.link.check_connections()
                self.link.receive()
            except WorkerLost as error:
                lost.append(error)
            return bool(lost)

        assert eventually(is_lost)
        return lost[0]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    sockets.make_private(tmp_path / "run")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"tcp://127.0.0.1:{free_port(adjacent=2)}"
    config = EngineConfig(
        worker=WorkerConfig(model="/models/m", max_slots=8, measurements="/home/me"),
        tensor_parallel=2,
        workers_elsewhere=2,
        worker_address=address,
    )
    link = WorkerLink(context, config, f"ipc://{tmp_path / 'run' / 'w'}", KEY)
    scene = Scene(context, link, address)
    yield scene
    link.stop()
    for worker in scene.workers:
        worker.socket.close(linger=0)
    context.destroy(linger=0)


def test_a_worker_gets_the_settings_of_a_free_rank_without_directories(scene: Scene) -> None:
    for rank in (1, 0):
        worker = scene.connect()
        worker.send(WorkerJoins(rank=1 if rank else -1))
        assert scene.receives_nothing_until(worker)
        settings: Any = worker.receive()
        config = msgspec.json.decode(settings.config, type=WorkerConfig)
        assert (config.rank, config.world_size, config.max_slots) == (rank, 2, 8)
        assert (config.model, config.measurements, config.address) == ("m", "", "")
        port = int(scene.address.rpartition(":")[2])
        assert config.rendezvous == f"tcp://127.0.0.1:{port + 1}"


@pytest.mark.parametrize("wanted", [0, 7])
def test_a_worker_without_a_free_rank_is_refused(scene: Scene, wanted: int) -> None:
    scene.join(0)
    late = scene.connect()
    late.send(WorkerJoins(rank=wanted))
    assert scene.receives_nothing_until(late)
    refused = late.receive()
    assert isinstance(refused, JoinRefused)
    assert f"rank {wanted} is taken" in refused.error


def test_workers_without_the_cluster_key_are_not_admitted(scene: Scene) -> None:
    stranger = scene.connect(ClusterKey(b"x" * 32))
    stranger.send(WorkerJoins(rank=0))
    scene.join(0)  # else the rank would be taken
    assert not stranger.socket.poll(0)


def test_the_group_is_ready_when_all_ranks_are_with_the_least_limits(scene: Scene) -> None:
    first, second = scene.join(), scene.join()
    first.send(TOKENIZER)
    assert scene.receive() == TOKENIZER
    first.send(READY)
    second.send(msgspec.structs.replace(READY, rank=1, num_blocks=20, max_len=300, phases=[]))
    assert scene.receive() == msgspec.structs.replace(READY, num_blocks=20, max_len=300)


def ready_group(scene: Scene) -> tuple[Rank, Rank]:
    first, second = scene.join(), scene.join()
    first.send(READY)
    second.send(msgspec.structs.replace(READY, rank=1))
    assert scene.receive() == READY
    return first, second


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": a_card(digest="f" * 64)}, "worker rank 1 has loaded another model than rank 0"),
        ({"kv_groups": KVGroups(window=8, window_blocks=1)}, "different values of kv_groups"),
    ],
)
def test_ranks_that_differ_are_refused(scene: Scene, change: dict[str, Any], message: str) -> None:
    first, second = scene.join(), scene.join()
    first.send(READY)
    second.send(msgspec.structs.replace(READY, rank=1, **change))
    assert message in str(scene.lose())


def test_all_ranks_get_all_messages_in_order_and_rank_0_answers(scene: Scene) -> None:
    ranks = ready_group(scene)
    sent: list[ToWorker] = [step_plan(1), Masks(step=1, bits=Int32.of([])), step_plan(2)]
    for message in sent:
        scene.link.send(message)
    for rank in ranks:
        assert [rank.receive() for _ in sent] == sent
    ranks[0].send(RESULT)
    assert scene.receive() == RESULT
    scene.link.stop()
    assert [rank.receive() for rank in ranks] == [Stop(), Stop()]


def with_tokens(step: int, tokens: list[int]) -> StepResult:
    return StepResult(step=step, tokens=Int32.of(tokens), failed=Int32.of([]))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("wrong_step", [None, 1, DIGEST_STEPS])
def test_a_rank_that_samples_other_tokens_is_lost(
    scene: Scene, wrong_step: int | None, order: tuple[int, int]
) -> None:
    """Rank 0 answers, and rank 1 reports its digest, in either order."""
    ranks, digest = ready_group(scene), TokenDigest()
    results = [with_tokens(step, [step, 7]) for step in range(1, DIGEST_STEPS + 1)]
    for result in results[:-1]:
        ranks[0].send(result)
        assert scene.receive() == result
    drawn = [with_tokens(r.step, [8]) if r.step == wrong_step else r for r in results]
    (report,) = [found for each in drawn if (found := digest.add(each)) is not None]
    last = (results[-1], report)
    for rank in order:
        ranks[rank].send(last[rank])
    if wrong_step is None:
        assert scene.receive() == results[-1]
        ranks[0].send(RESULT)
        assert scene.receive() == RESULT
    else:
        assert "worker rank 1 has sampled other tokens than rank 0" in str(scene.lose())


def test_answers_of_other_ranks_than_0_are_ignored(scene: Scene) -> None:
    first, second = ready_group(scene)
    second.send(with_tokens(1, [9]))
    first.send(RESULT)
    assert scene.receive() == RESULT


FAILED = WorkerFailed(message="out of memory", rank=1, exit_code=ExitCode.OUT_OF_MEMORY)
CONSEQUENCE = WorkerFailed(message="lost another rank", rank=0, is_consequence=True)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_failure_of_the_rank_that_caused_the_others_is_reported(
    scene: Scene, order: tuple[int, int]
) -> None:
    ranks, messages = ready_group(scene), (CONSEQUENCE, FAILED)
    for rank in order:
        ranks[rank].send(messages[rank])
    error = scene.lose()
    assert (str(error), error.exit_code) == ("worker rank 1: out of memory", FAILED.exit_code)


def test_a_failure_without_a_known_cause_is_reported_as_it_is(scene: Scene) -> None:
    ranks = ready_group(scene)
    for number, rank in enumerate(ranks):
        rank.send(msgspec.structs.replace(CONSEQUENCE, rank=number))
    assert "lost another rank" in str(scene.lose())


def test_a_malformed_message_of_any_rank_is_an_error_that_names_it(scene: Scene) -> None:
    _, second = ready_group(scene)
    second.socket.send_multipart([b"\x01nonsense"])
    assert "worker rank 1 sent a malformed message" in str(scene.lose())


def test_a_worker_that_disconnects_is_lost(scene: Scene) -> None:
    _, second = ready_group(scene)
    second.socket.close(linger=0)
    assert str(scene.lose()) == "worker rank 1: the connection to its machine was lost"


def test_a_disconnected_rank_is_the_cause_if_another_one_fails_for_it(scene: Scene) -> None:
    first, second = ready_group(scene)
    second.socket.close(linger=0)
    first.send(CONSEQUENCE)
    assert "worker rank 1: the connection" in str(scene.lose())


def test_messages_of_strangers_are_dropped_and_counted(scene: Scene) -> None:
    """A worker of another machine is a member only after WorkerJoins."""
    stranger = scene.connect()
    for message in (READY, FAILED, TOKENIZER, RESULT):
        stranger.send(message)

    def is_counted() -> bool:
        assert scene.link.receive() is None
        return scene.link.num_foreign_messages == 4

    assert eventually(is_counted)
