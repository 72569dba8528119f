"""The worker's loop over a real socket, with a device that takes its time.

The model computes on the CPU; only the mark in the device's queue (`readback.Event`) is another: it
is reached when the test says so. So the order of launches and results is what it is on a GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from protocol import sockets, wire
from protocol.arrays import Int32
from protocol.steps import FromWorker, Masks, StepPlan, StepResult, Stop, ToWorker
from tests.support.kv_worker import tiny_exchange
from tests.support.plans import slot_init, step_plan
from tests.support.tiny_model import VOCAB, TinyModel, tiny_cache, tiny_runner, tiny_slots
from worker.batch.readback import DeviceEvent, mark
from worker.debug.slot_registry import CheckedRunner
from worker.loop import WorkerLoop
from worker.process import EngineConnection

WAIT_S = 20.0
PROMPT = [5, 9, 2, 77, 31]
SLOTS = 13


@dataclass
class Reached:
    """The place behind one step: reached when the test sets it."""

    event: threading.Event = field(default_factory=threading.Event)

    def query(self) -> bool:
        return self.event.is_set()

    def synchronize(self) -> None:
        assert self.event.wait(WAIT_S), "a step was waited for that nobody ends"


@dataclass
class Device:
    """Steps are launched at once and end when `end` says so, oldest first."""

    launched: list[Reached] = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)
    num_ended: int = 0

    def mark(self, device: torch.device) -> DeviceEvent:
        with self.news:
            self.launched.append(Reached())
            self.news.notify_all()
            return self.launched[-1]

    def await_launches(self, count: int) -> None:
        with self.news:
            assert self.news.wait_for(lambda: len(self.launched) >= count, WAIT_S)

    def end(self) -> None:
        self.launched[self.num_ended].event.set()
        self.num_ended += 1


@dataclass
class LoopBench:
    """A loop in a thread, the engine's end of its socket, and its device."""

    socket: zmq.Socket[bytes]
    identity: bytes
    thread: threading.Thread
    device: Device
    failure: list[Exception]

    def say(self, message: ToWorker) -> None:
        self.socket.send_multipart([self.identity, *wire.encode(message)])

    def hear(self) -> StepResult:
        assert self.socket.poll(int(WAIT_S * 1000)), f"nothing heard: {self.failure}"
        message = wire.Decoder[FromWorker](FromWorker).decode(self.socket.recv_multipart()[1:])
        assert isinstance(message, StepResult)
        return message

    def hears_nothing(self) -> bool:
        return not self.socket.poll(50)

    def stop(self) -> None:
        self.say(Stop())
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def start(kind: str, folder: Path, model: TinyModel | None = None) -> Iterator[LoopBench]:
    """kind: "slow", a device that works by itself; "cpu", one whose work is done when asked for."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets.make_private(folder / "run")
    address = f"ipc://{folder / 'run' / 'engine'}"
    socket = sockets.bind_router(context, address)
    device, failure = Device(), []
    runner = tiny_runner(
        tiny_slots(SLOTS),
        tiny_cache(20),
        model,
        mark=device.mark if kind == "slow" else mark,
        kind=CheckedRunner,
    )

    def work() -> None:
        engine = EngineConnection(context, address, os.getppid())
        try:
            engine.send(StepResult(step=0, tokens=Int32(b""), failed=Int32(b"")))
            with (
                tiny_exchange(context) as kv_transfers,
                WorkerLoop(runner, engine, kv_transfers) as loop,
            ):
                loop.run()
        except Exception as error:  # told by whoever waits for the worker in vain
            failure.append(error)
        finally:
            engine.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert socket.poll(int(WAIT_S * 1000)), failure
    identity, *_ = socket.recv_multipart()
    bench = LoopBench(socket, identity, thread, device, failure)
    yield bench
    for reached in device.launched:
        reached.event.set()
    if thread.is_alive():
        bench.say(Stop())
    thread.join(WAIT_S)
    socket.close(linger=0)
    context.term()


@pytest.fixture
def slow(tmp_path) -> Iterator[LoopBench]:
    yield from start("slow", tmp_path)


@pytest.fixture
def cpu(tmp_path) -> Iterator[LoopBench]:
    yield from start("cpu", tmp_path)


def first(**more: Any) -> StepPlan:
    init = slot_init(0, PROMPT, blocks=[3, 4, 5])
    return step_plan(1, bind=[init], rows=[(0, 0, len(PROMPT), True)], zero=[3, 4, 5], **more)


def after(step: int, **more: Any) -> StepPlan:
    """The step-th plan computes the token that the one before has sampled."""
    return step_plan(step, rows=[(0, len(PROMPT) + step - 2, 1, True)], **more)


def only(step: int, token: int) -> Masks:
    words = [(1 << token % 32 if token // 32 == word else 0) for word in range(-(-VOCAB // 32))]
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    return Masks(step=step, bits=Int32.of(signed, (1, len(words))))


def answers(count: int) -> list[list[int]]:
    """What the steps sample, one after the other."""
    runner = tiny_runner(tiny_slots(3), tiny_cache(20))
    plans = [first(), *(after(step) for step in range(2, count + 1))]
    return [runner.step(plan).tokens.tolist() for plan in plans]


def test_the_next_step_is_launched_while_the_one_before_is_on_its_way(slow):
    slow.say(first())
    slow.say(after(2))
    slow.device.await_launches(2)
    assert slow.hears_nothing(), "nothing is done yet"
    slow.device.end()
    results = [slow.hear()]
    assert slow.hears_nothing(), "the second is not done"
    slow.say(after(3))
    slow.device.await_launches(3)
    slow.device.end()
    slow.device.end()
    results += [slow.hear(), slow.hear()]
    assert [result.step for result in results] == [1, 2, 3]
    assert [result.tokens.tolist() for result in results] == answers(3)


def test_a_plan_that_comes_while_a_step_is_waited_for_is_launched_at_once(slow):
    slow.say(first())
    slow.device.await_launches(1)
    assert slow.hears_nothing()  # by now the loop waits, for a message and for the device
    slow.say(after(2))
    slow.device.await_launches(2)
    slow.device.end()
    slow.device.end()
    assert [slow.hear().step, slow.hear().step] == [1, 2]


def test_what_is_out_is_told_before_masks_are_waited_for(slow):
    slow.say(first())
    slow.say(after(2, masked=[0]))
    assert slow.hears_nothing()
    slow.device.end()
    assert slow.hear().step == 1
    assert len(slow.device.launched) == 1, "its launch needs the masks"
    token = (answers(2)[1][0] + 1) % VOCAB
    slow.say(only(2, token))
    slow.device.await_launches(2)
    slow.device.end()
    assert slow.hear().tokens.tolist() == [token]


def test_on_the_cpu_a_result_is_told_before_the_next_plan_is_touched(cpu):
    cpu.say(first())
    cpu.say(first())  # contradicts the slots: whoever touches it fails
    assert cpu.hear().tokens.tolist() == answers(1)[0]
    cpu.thread.join(WAIT_S)
    assert [str(error) for error in cpu.failure] == ["slot 0 is already bound"]


def test_stop_is_obeyed_while_nothing_is_out(cpu):
    cpu.stop()
    assert cpu.failure == []


def test_stop_is_obeyed_while_a_step_is_out_and_the_step_is_let_finish(slow):
    slow.say(first())
    slow.device.await_launches(1)
    slow.say(Stop())
    assert slow.hears_nothing()
    assert slow.thread.is_alive()
    slow.device.end()
    slow.thread.join(WAIT_S)
    assert not slow.thread.is_alive()
    assert slow.failure == []


class Remembering(TinyModel):
    """It keeps something of every slot, from its second pass on."""

    passes = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.memory = torch.zeros(SLOTS) if self.passes > 1 else None
        return super().logits(hidden)


def test_a_per_slot_tensor_that_is_made_at_work_ends_the_worker_and_is_named(tmp_path):
    for bench in start("cpu", tmp_path, Remembering()):
        bench.say(first())
        bench.hear()
        bench.say(after(2))
        bench.thread.join(WAIT_S)
        (error,) = bench.failure
        assert "(13,) torch.float32 held by" in str(error)
        assert "Remembering" in str(error)
