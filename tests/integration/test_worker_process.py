"""The worker as a process: it loads, reports that it is ready, executes plans, and exits."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from msgspec.structs import replace

from protocol.config.worker import WorkerConfig
from protocol.engine.sampling import SamplingParams
from protocol.process.exit_codes import ExitCode
from protocol.wire import codec, sockets
from protocol.wire.arrays import Int32
from protocol.worker.kv import KVExport, KVFetch, KVReport, KVWithdraw, PeerSource
from protocol.worker.ranks import DIGEST_STEPS, TokenDigest
from protocol.worker.steps import (
    FromWorker,
    Masks,
    StepPlan,
    StepResult,
    Stop,
    TokenizerRead,
    ToWorker,
    WorkerFailed,
    WorkerReady,
)
from tests.support.plans import slot_init, step_plan
from tests.support.tiny_checkpoint import CONFIG, write_tiny_llama
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
START_S, STEP_S = 60, 20
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class FakeEngine:
    """The engine's end of the connection, and the worker's process."""

    socket: zmq.Socket[bytes]
    process: subprocess.Popen[str]
    identity: bytes = b""

    def receive(self, timeout_s: float = STEP_S) -> FromWorker:
        """Return the next message, except TokenizerRead."""
        message = self.receive_any(timeout_s)
        return self.receive_any(timeout_s) if isinstance(message, TokenizerRead) else message

    def receive_any(self, timeout_s: float) -> FromWorker:
        assert self.socket.poll(int(timeout_s * 1000)), f"nothing received: {self.process.poll()}"
        self.identity, *frames = self.socket.recv_multipart()
        return codec.Decoder(FromWorker).decode(frames)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.identity, *frames])

    def step(self, plan: ToWorker) -> FromWorker:
        """Send a message and return the answer."""
        self.send(*codec.encode(plan))
        return self.receive()

    def exit_code(self) -> int:
        return self.process.wait(STEP_S)


@dataclass
class Starter:
    """Starts workers. The fixture `start` kills them."""

    folder: Path
    context: zmq.Context[zmq.Socket[bytes]]
    engines: list[FakeEngine]

    def __call__(self, model: Path | str, **settings: Any) -> FakeEngine:
        sockets.make_private(self.folder / "run")
        address = f"ipc://{self.folder / 'run' / f'w{len(self.engines)}'}"
        socket = sockets.bind_router(self.context, address)
        settings = {"dtype": "float32", "poison_slots": "wild"} | settings
        config = WorkerConfig(model=str(model), address=address, **settings)
        process = subprocess.Popen(command(config), cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.engines.append(FakeEngine(socket, process))
        return self.engines[-1]


def command(config: WorkerConfig) -> list[str]:
    return [sys.executable, "-P", "-m", "worker", "--config", msgspec.json.encode(config).decode()]


@pytest.fixture
def start(tmp_path, monkeypatch) -> Iterator[Starter]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    starter = Starter(tmp_path, zmq.Context(), [])
    yield starter
    for engine in starter.engines:
        engine.process.kill()
        engine.process.communicate()
    starter.context.destroy(linger=0)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


PROMPT = list(range(3, 12))


def first_step(step: int = 1, **more: Any) -> StepPlan:
    init = slot_init(0, PROMPT, blocks=[3], params=GREEDY)
    return step_plan(step, bind=[init], rows=[(0, 0, len(PROMPT), True)], zero=[3], **more)


def test_a_step_with_masked_rows_waits_for_its_masks_and_applies_them(start, tiny_llama):
    engine = start(tiny_llama, max_slots=5, block_tokens=16)
    engine.receive(START_S)
    free = engine.step(first_step()).tokens.tolist()[0]
    token = (free + 1) % 97
    engine.send(*codec.encode(step_plan(2, rows=[(0, len(PROMPT), 1, True)], masked=[0])))
    assert not engine.socket.poll(300), "the worker answered before it had the masks"
    words = [1 << token % 32 if word == token // 32 else 0 for word in range(4)]
    words = [word - (1 << 32) if word >> 31 else word for word in words]
    engine.send(*codec.encode(Masks(step=2, bits=Int32.of(words, (1, 4)))))
    assert engine.receive().tokens.tolist() == [token]


def test_masks_without_a_plan_end_the_worker_with_a_message(start, tiny_llama):
    engine = start(tiny_llama, max_slots=5, block_tokens=16)
    engine.receive(START_S)
    engine.send(*codec.encode(Masks(step=7, bits=Int32.of([1], (1, 1)))))
    failed = engine.receive()
    assert isinstance(failed, WorkerFailed)
    assert "step 7" in failed.message
    assert engine.exit_code() == ExitCode.WORKER_LOST


def test_a_worker_reports_its_limits_computes_plans_and_stops_with_code_0(start, tiny_llama):
    engine = start(tiny_llama, max_slots=5, block_tokens=16)
    ready = engine.receive(START_S)
    assert isinstance(ready, WorkerReady), ready
    assert ready.model.context_tokens == ready.max_len == CONFIG["max_position_embeddings"]
    assert ready.model.eos_token_ids == [2]
    assert (ready.max_slots, ready.block_tokens) == (5, 16)
    assert ready.kv is not None  # the worker exports nothing, and can fetch blocks of this layout
    assert ready.kv.address == ""
    assert ready.kv.layout
    assert [name for name, _ in ready.phases] == [
        "import torch",
        "load weights",
        "reserve memory",
        "warm up",
    ]
    first = engine.step(first_step())
    again = engine.step(step_plan(2, rows=[(0, len(PROMPT), 1, True)]))
    assert (first.step, again.step) == (1, 2)
    assert len(first.tokens) == len(again.tokens) == 1
    assert first.compute_s > 0
    # The sampled token is the next input: a new slot with both tokens gives the same result.
    known = PROMPT + first.tokens.tolist()
    init = slot_init(4, known, blocks=[5], params=GREEDY)
    plan = step_plan(3, bind=[init], rows=[(4, 0, len(known), True)], zero=[5], release=[(0, 1)])
    assert engine.step(plan).tokens == again.tokens
    engine.send(*codec.encode(Stop()))
    assert engine.exit_code() == 0


def test_the_engine_gets_the_tokenizer_before_the_weights_are_loaded(start, tmp_path):
    model = write_tiny_llama(tmp_path)
    engine = start(model)
    tokenizer = engine.receive_any(START_S)
    assert isinstance(tokenizer, TokenizerRead), tokenizer
    assert tokenizer.tokenizer == (model / "tokenizer.json").read_bytes()
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (CONFIG["vocab_size"], [2])
    assert isinstance(engine.receive_any(START_S), WorkerReady)


def test_the_engine_gets_what_is_on_disk_before_it_can_plan(start, tiny_llama, tmp_path):
    """If the report followed WorkerReady, a waiting request could be planned before the report."""
    disk, block = tmp_path / "kv", b"\xab" * 32
    first = start(tiny_llama, kv_disk=str(disk))
    ready = first.receive(START_S)
    assert ready.kv_tiers == ["disk"]
    assert ready.kv_report is None
    first.send(*codec.encode(Stop()))
    assert first.exit_code() == 0
    (layout,) = disk.iterdir()
    (layout / block.hex()).write_bytes(b"a block")
    ready = start(tiny_llama, kv_disk=str(disk)).receive(START_S)
    (tier,) = ready.kv_report.tiers
    assert (tier.tier, tier.stored) == ("disk", [block])


def test_a_draft_model_proposes_tokens_that_verify(start, tiny_llama):
    """The model is its own draft model, so its proposals are what it samples next."""
    engine = start(tiny_llama, draft_model=str(tiny_llama), max_slots=5)
    ready = engine.receive(START_S)
    assert isinstance(ready, WorkerReady), ready
    assert ready.draft_cost == 1.0
    assert "load the draft model" in [name for name, _ in ready.phases]
    first = engine.step(first_step(follow={0: (0, 3)}))
    assert isinstance(first, StepResult), first
    assert first.proposed is not None
    proposals = first.proposed.tolist()
    plan = step_plan(2, rows=[(0, len(PROMPT), 4, True)], drafts={0: proposals})
    assert engine.step(plan).tokens.tolist()[:3] == proposals


def test_a_draft_model_of_another_vocabulary_is_refused_in_one_line(start, tiny_llama, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_tiny_llama(other)
    spelt = (other / "tokenizer.json").read_text().replace('"w7"', '"seven"')
    (other / "tokenizer.json").write_text(spelt)
    failed = start(tiny_llama, draft_model=str(other)).receive(START_S)
    assert isinstance(failed, WorkerFailed), failed
    assert "have different vocabularies" in failed.message
    assert "\n" not in failed.message


@pytest.mark.parametrize("mover", ["auto", "zmq"])
def test_one_worker_computes_a_prompt_and_another_continues_from_it(start, tiny_llama, mover):
    """The K/V of all tokens except the last comes from the other worker."""
    settings = {"max_slots": 5, "block_tokens": 4, "kv_mover": mover}
    address = f"ipc://{start.folder / 'run' / 'kv'}"
    prefill = start(tiny_llama, kv_export=True, kv_address=address, **settings)
    decode = start(tiny_llama, **settings)
    ready = prefill.receive(START_S)
    assert (ready.kv.address, ready.kv.mover) == (address, mover)
    assert decode.receive(START_S).kv.address == ""

    def plan(done: int, blocks: list[int], slot: int) -> StepPlan:
        tokens = len(PROMPT) - done
        init = slot_init(slot, PROMPT, num_computed=done, blocks=blocks, params=GREEDY)
        fresh = blocks[done // 4 :]
        return step_plan(1, bind=[init], rows=[(slot, done, tokens, True)], zero=fresh)

    expected = prefill.step(plan(0, [3, 9, 4], 0)).tokens
    lease = b"prompt"
    prefill.send(*codec.encode(KVExport(lease=lease, blocks=Int32.of([3, 9]), readers=1)))
    source = PeerSource(address=address, lease=lease)
    fetch = KVFetch(job=7, source=source, blocks=Int32.of([8, 2]), timeout_s=5)
    while (report := decode.step(fetch)).failed:  # the other worker has not received the lease yet
        assert report.failed[0].kind == "expired"
        fetch = replace(fetch, job=fetch.job + 1)
    assert [(done.job, done.num_bytes > 0) for done in report.fetched] == [(fetch.job, True)]
    assert decode.step(plan(8, [8, 2, 5], 3)).tokens == expected
    assert prefill.receive() == KVReport(taken=[lease])
    prefill.send(*codec.encode(KVWithdraw(lease=lease)))
    prefill.step(step_plan(2))  # the worker has received the message before it answers this step
    late = decode.step(replace(fetch, job=99))
    assert [(failed.job, failed.kind) for failed in late.failed] == [(99, "expired")]
    for engine in (prefill, decode):
        engine.send(*codec.encode(Stop()))
        assert engine.exit_code() == 0


def test_a_worker_without_the_configured_nixl_names_the_package_to_install(start, tiny_llama):
    if importlib.util.find_spec("nixl_cu12") is not None:
        pytest.skip("nixl-cu12 is installed")
    failed = start(tiny_llama, kv_mover="nixl").receive(START_S)
    assert isinstance(failed, WorkerFailed)
    assert "[nixl]" in failed.message


def test_a_small_cache_reduces_the_longest_request(start, tiny_llama):
    ready = start(tiny_llama, kv_blocks=4, block_tokens=16, max_slots=2).receive(START_S)
    assert (ready.num_blocks, ready.max_len) == (4, 48)


def test_a_plan_that_contradicts_the_slots_ends_the_worker_and_names_the_cause(start, tiny_llama):
    engine = start(tiny_llama)
    assert isinstance(engine.receive(START_S), WorkerReady)
    engine.step(first_step())
    failed = engine.step(first_step(step=2))
    assert failed == WorkerFailed(message="slot 0 is already bound")
    assert engine.exit_code() == ExitCode.WORKER_LOST


def blocks_at(step: int) -> list[tuple[int, int, int]]:
    """Return the block to add so that a decode step after PROMPT has a place for its token."""
    position = len(PROMPT) + step - 2
    return [(0, position // 16, 4)] if position == 16 else []


def test_a_rank_that_fails_is_told_from_one_that_has_lost_it(start, tiny_llama, tmp_path):
    """Both compute some steps, after which rank 1 reports the digest of rank 0's tokens. Then only
    rank 1 gets a plan that contradicts its slots, and rank 0 waits for it in the same step."""
    meeting = f"file://{tmp_path / 'meeting'}"
    ranks = [
        start(tiny_llama, rank=rank, world_size=2, local_size=2, rendezvous=meeting, threads=1)
        for rank in range(2)
    ]
    for rank, engine in enumerate(ranks):
        ready = engine.receive(START_S)
        assert isinstance(ready, WorkerReady), ready
        assert ready.rank == rank
        engine.send(*codec.encode(first_step()))
    digest, reports = TokenDigest(), [ranks[0].receive()]
    for step in range(2, DIGEST_STEPS + 1):
        plan = step_plan(step, rows=[(0, len(PROMPT) + step - 2, 1, True)], extend=blocks_at(step))
        for engine in ranks:
            engine.send(*codec.encode(plan))
        reports.append(ranks[0].receive())
    assert ranks[1].receive() == [digest.add(result) for result in reports][-1]
    plan = step_plan(99, rows=[(0, len(PROMPT) + DIGEST_STEPS - 1, 1, True)])
    ranks[0].send(*codec.encode(plan))
    ranks[1].send(*codec.encode(first_step(step=99)))
    assert ranks[1].receive() == WorkerFailed(message="slot 0 is already bound", rank=1)
    lost = ranks[0].receive()
    assert isinstance(lost, WorkerFailed), lost
    assert (lost.rank, lost.is_consequence) == (0, True)
    assert "lost the connection to another rank" in lost.message
    assert [engine.exit_code() for engine in ranks] == [ExitCode.WORKER_LOST] * 2


def test_ranks_with_unequal_threads_are_refused(start, tiny_llama, tmp_path):
    """Their results could have other bits, and so their answers could diverge."""
    meeting = f"file://{tmp_path / 'meeting'}"
    ranks = [
        start(
            tiny_llama, rank=rank, world_size=2, local_size=2, rendezvous=meeting, threads=1 + rank
        )
        for rank in range(2)
    ]
    failed = ranks[1].receive(START_S)
    assert isinstance(failed, WorkerFailed), failed
    assert "all ranks must compute alike" in failed.message
    assert "threads 1; rank 1 has" in failed.message
    assert (failed.rank, failed.is_consequence) == (1, False)


def test_a_malformed_message_ends_the_worker_and_is_reported(start, tiny_llama):
    engine = start(tiny_llama)
    assert isinstance(engine.receive(START_S), WorkerReady)
    engine.send(b"\x01\xc1")
    assert isinstance(engine.receive(), WorkerFailed)
    assert engine.exit_code() == ExitCode.WORKER_LOST


def test_a_missing_model_is_reported_in_one_line(start, tmp_path):
    engine = start(tmp_path / "nothing")
    failed = engine.receive(START_S)
    assert isinstance(failed, WorkerFailed)
    assert "nothing does not exist" in failed.message
    assert "\n" not in failed.message
    assert engine.exit_code() == ExitCode.BAD_MODEL


@pytest.mark.parametrize("settings", ["{}", '{"model": "x"}', '{"model": "x", "slots": 3}', "no"])
def test_a_bad_command_line_exits_with_code_2_and_the_reason(settings):
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "worker", "--config", settings],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert ended.returncode == 2
    assert "bad --config" in ended.stderr


def test_a_worker_ignores_ctrl_c_and_uses_no_cpu_while_idle(start, tiny_llama):
    engine = start(tiny_llama, threads=2)
    assert isinstance(engine.receive(START_S), WorkerReady)
    engine.process.send_signal(signal.SIGINT)
    engine.step(first_step())
    idle = psutil.Process(engine.process.pid)
    # Percent of one second. The first second may still include the end of the step.
    assert eventually(lambda: idle.cpu_percent(interval=1.0) < 2)
    assert engine.process.poll() is None


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_worker_does_not_outlive_the_process_that_started_it(start, tiny_llama, tmp_path):
    sockets.make_private(tmp_path / "run")
    address = f"ipc://{tmp_path / 'run' / 'orphan'}"
    socket = sockets.bind_router(start.context, address)
    config = WorkerConfig(model=str(tiny_llama), address=address)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *command(config)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert socket.poll(START_S * 1000), "the worker sent nothing"
    finally:
        parent.kill()
        parent.communicate()
        socket.close(linger=0)
    gone, _ = psutil.wait_procs([worker], timeout=STEP_S)
    assert gone == [worker] or worker.status() == psutil.STATUS_ZOMBIE
