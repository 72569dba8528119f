"""The ranks of a tensor parallel group as processes: of an engine, and of other machines.

The other machines are this one, over 127.0.0.1.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from protocol.engine.sampling import SamplingParams
from protocol.process.exit_codes import ExitCode
from protocol.sdk.client import Client
from protocol.wire.cluster_key import write_cluster_key
from protocol.wire.errors import EngineLost
from protocol.wire.sockets import MEETING_FILE
from tests.support.ports import free_port
from tests.support.processes import Program, descendants_of, is_alive
from tests.support.replica import Replica, load
from tests.support.tiny_checkpoint import write_roomy_llama
from tests.support.waiting import eventually

PROMPT = [5, 6, 7]
NUM_TOKENS = 30
SAMPLED = [
    SamplingParams(temperature=temperature, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    for temperature in (0.0, 1.0)
]
ENDLESS = 15_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_roomy_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """Return the answers of one worker."""
    replica = Replica(load(checkpoint))
    numbers = [replica.add(PROMPT, params) for params in SAMPLED]
    replica.run()
    return [replica.tokens(number) for number in numbers]


@dataclass
class RunningGroup:
    """An engine of two workers, the programs that join it, and a client."""

    engine: Program
    joined: list[Program]
    client: Client

    @property
    def answers(self) -> list[list[int]]:
        return [self.client.generate(PROMPT, params).tokens() for params in SAMPLED]

    @property
    def workers(self) -> dict[int, int]:
        """Return rank -> process id of the workers that the engine has started."""
        found = descendants_of(self.engine.process.pid)
        configs = {pid: words.partition("--config ")[2] for pid, words in found}
        return {json.loads(text)["rank"]: pid for pid, text in configs.items() if text}


@contextmanager
def started(
    checkpoint: Path,
    folder: Path,
    *,
    elsewhere: int = 0,
    join: Sequence[tuple[list[str], list[str]]] = (),
) -> Iterator[RunningGroup]:
    """Start an engine and the programs that join it.

    join   their arguments, before and after those that all of them need
    """
    run, key, port = folder / "run", folder / "cluster.key", free_port(adjacent=2)
    run.mkdir(mode=0o700)
    folder.chmod(0o700)
    write_cluster_key(str(key))
    address, worker_address = f"ipc://{run}/engine.sock", f"tcp://127.0.0.1:{port}"
    worker = {"model": str(checkpoint), "dtype": "float32", "kv_blocks": 1100, "threads": 1}
    worker |= {"poison_slots": "wild"}
    config: dict[str, Any] = {"address": address, "tensor_parallel": 2, "worker": worker}
    if elsewhere:
        config |= {"workers_elsewhere": elsewhere, "worker_address": worker_address}
        config |= {"cluster_key": str(key)}
    arguments = [str(checkpoint), "--join", worker_address, "--cluster-key", str(key)]
    with ExitStack() as stack:
        engine = Program(["-P", "-m", "engine_core", "--config", json.dumps(config)])
        stack.enter_context(engine)
        joined = [
            stack.enter_context(Program([*before, "-m", "tools", "worker", *arguments, *after]))
            for before, after in join
        ]
        client = stack.enter_context(Client(address, wait_s=60))
        yield RunningGroup(engine, joined, client)


def test_two_workers_answer_like_one_and_stop_when_the_engine_drains(
    checkpoint: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    with started(checkpoint, tmp_path) as group:
        assert group.answers == expected
        workers = group.workers
        assert workers.keys() == {0, 1}
        group.engine.signal(signal.SIGTERM)
        assert group.engine.end() == ExitCode.OK
        assert not any(map(is_alive, workers.values()))
        assert not list((tmp_path / "run").glob(f"{MEETING_FILE}*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_no_rank_survives_it(
    checkpoint: Path, tmp_path: Path, rank: int
) -> None:
    with started(checkpoint, tmp_path) as group:
        answer = group.client.generate(PROMPT, max_tokens=ENDLESS, ignore_eos=True)
        next(answer)
        workers = group.workers
        killed_at = time.monotonic()
        os.kill(workers[rank], signal.SIGKILL)
        with pytest.raises(EngineLost, match=f"worker rank {rank} was killed by SIGKILL"):
            answer.tokens()
        print(f"the error took {time.monotonic() - killed_at:.3f} s")
        assert group.engine.end() == ExitCode.WORKER_LOST
        assert not any(map(is_alive, workers.values()))


def test_a_worker_of_another_machine_joins_and_its_death_ends_the_engine(
    checkpoint: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    """Another worker is refused, because rank 0 is on the engine's machine."""
    threads, taken = ["--threads", "1"], ["--rank", "0"]
    with started(checkpoint, tmp_path, elsewhere=1, join=[([], threads), ([], taken)]) as group:
        assert group.answers == expected
        member, refused = group.joined
        assert refused.end() == ExitCode.USAGE
        assert "rank 0 is taken, or not among its ranks for other machines: 1" in refused.err[-1]
        (own,) = group.workers.values()
        answer = group.client.generate(PROMPT, max_tokens=ENDLESS, ignore_eos=True)
        next(answer)
        member.process.kill()
        with pytest.raises(EngineLost, match="worker rank 1"):
            answer.tokens()
        assert group.engine.end() == ExitCode.WORKER_LOST
        assert not is_alive(own)


def test_torchrun_starts_the_group_and_its_workers_end_with_the_engine(
    checkpoint: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    """torchrun gives the ranks and the place where they meet. The engine is killed while the
    workers compute, so both notice it without a message."""
    port = free_port()
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={port}"]
    with started(checkpoint, tmp_path, elsewhere=2, join=[(torchrun, [])]) as group:
        assert group.answers == expected
        assert not group.workers
        workers = [pid for pid, words in descendants_of(group.joined[0].process.pid)]
        assert len(workers) == 2
        answer = group.client.generate(PROMPT, max_tokens=ENDLESS, ignore_eos=True)
        next(answer)
        group.engine.process.kill()
        with pytest.raises(EngineLost):
            answer.tokens()
        assert group.joined[0].end() != 0
        assert eventually(lambda: not any(map(is_alive, workers)))
