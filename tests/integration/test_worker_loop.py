"""The worker's loop over a real socket, with a device that the test controls.

The model computes on the CPU. Only the event in the device's queue (`readback.DeviceEvent`) is
fake: the test decides when it is done. So launches and results have the same order as on a GPU.
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

from protocol.wire import codec, sockets
from protocol.wire.arrays import Int32
from protocol.worker.steps import FromWorker, Masks, StepPlan, StepResult, Stop, ToWorker
from tests.support.kv_worker import idle_transfers
from tests.support.plans import slot_init, step_plan
from tests.support.tiny_model import VOCAB, TinyModel, tiny_cache, tiny_runner, tiny_slots
from worker.device.readback import DeviceEvent, mark
from worker.service.connection import EngineConnection
from worker.service.loop import WorkerLoop
from worker.step.slot_registry import CheckedRunner

WAIT_S = 20.0
PROMPT = [5, 9, 2, 77, 31]
SLOTS = 13


@dataclass
class ControlledEvent:
    """The event after one step. The test sets it."""

    event: threading.Event = field(default_factory=threading.Event)

    def query(self) -> bool:
        return self.event.is_set()

    def synchronize(self) -> None:
        assert self.event.wait(WAIT_S), "the loop waits for a step that the test has not ended"


@dataclass
class Device:
    """A device whose steps end when the test calls `end`, the oldest first."""

    launched: list[ControlledEvent] = field(default_factory=list)
    condition: threading.Condition = field(default_factory=threading.Condition)
    num_ended: int = 0

    def mark(self, device: torch.device) -> DeviceEvent:
        with self.condition:
            self.launched.append(ControlledEvent())
            self.condition.notify_all()
            return self.launched[-1]

    def await_launches(self, count: int) -> None:
        with self.condition:
            assert self.condition.wait_for(lambda: len(self.launched) >= count, WAIT_S)

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

    def send(self, message: ToWorker) -> None:
        self.socket.send_multipart([self.identity, *codec.encode(message)])

    def receive(self) -> StepResult:
        assert self.socket.poll(int(WAIT_S * 1000)), f"nothing received: {self.failure}"
        message = codec.Decoder[FromWorker](FromWorker).decode(self.socket.recv_multipart()[1:])
        assert isinstance(message, StepResult)
        return message

    def receives_nothing(self) -> bool:
        return not self.socket.poll(50)

    def stop(self) -> None:
        self.send(Stop())
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def start(kind: str, folder: Path, model: TinyModel | None = None) -> Iterator[LoopBench]:
    """Run a loop in a thread. `kind` is "slow" for a device that works asynchronously, or "cpu" for
    one whose steps are done when they are launched."""
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
        engine = EngineConnection(sockets.connect_dealer(context, address), os.getppid())
        try:
            engine.send(StepResult(step=0, tokens=Int32(b""), failed=Int32(b"")))
            with (
                idle_transfers(context) as kv_transfers,
                WorkerLoop(runner, engine, kv_transfers) as loop,
            ):
                loop.run()
        except Exception as error:  # shown by the assertion that then fails
            failure.append(error)
        finally:
            engine.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert socket.poll(int(WAIT_S * 1000)), failure
    identity, *_ = socket.recv_multipart()
    bench = LoopBench(socket, identity, thread, device, failure)
    yield bench
    for controlled in device.launched:
        controlled.event.set()
    if thread.is_alive():
        bench.send(Stop())
    thread.join(WAIT_S)
    context.destroy(linger=0)


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
    """Return plan number `step`, which computes the token that the step before has sampled."""
    return step_plan(step, rows=[(0, len(PROMPT) + step - 2, 1, True)], **more)


def only(step: int, token: int) -> Masks:
    """Return masks that allow only this token."""
    words = [(1 << token % 32 if token // 32 == word else 0) for word in range(-(-VOCAB // 32))]
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    return Masks(step=step, bits=Int32.of(signed, (1, len(words))))


def answers(count: int) -> list[list[int]]:
    """Return the tokens that each of the first `count` steps samples."""
    runner = tiny_runner(tiny_slots(3), tiny_cache(20))
    plans = [first(), *(after(step) for step in range(2, count + 1))]
    return [runner.step(plan).tokens.tolist() for plan in plans]


def test_the_next_step_is_launched_while_a_step_is_in_flight(slow):
    slow.send(first())
    slow.send(after(2))
    slow.device.await_launches(2)
    assert slow.receives_nothing(), "nothing is done yet"
    slow.device.end()
    results = [slow.receive()]
    assert slow.receives_nothing(), "the second is not done"
    slow.send(after(3))
    slow.device.await_launches(3)
    slow.device.end()
    slow.device.end()
    results += [slow.receive(), slow.receive()]
    assert [result.step for result in results] == [1, 2, 3]
    assert [result.tokens.tolist() for result in results] == answers(3)


def test_a_plan_that_arrives_while_the_loop_waits_for_a_step_is_launched_at_once(slow):
    slow.send(first())
    slow.device.await_launches(1)
    assert slow.receives_nothing()  # by now the loop waits for a message and for the device
    slow.send(after(2))
    slow.device.await_launches(2)
    slow.device.end()
    slow.device.end()
    assert [slow.receive().step, slow.receive().step] == [1, 2]


def test_results_in_flight_are_sent_before_the_loop_waits_for_masks(slow):
    slow.send(first())
    slow.send(after(2, masked=[0]))
    assert slow.receives_nothing()
    slow.device.end()
    assert slow.receive().step == 1
    assert len(slow.device.launched) == 1, "its launch needs the masks"
    token = (answers(2)[1][0] + 1) % VOCAB
    slow.send(only(2, token))
    slow.device.await_launches(2)
    slow.device.end()
    assert slow.receive().tokens.tolist() == [token]


def test_on_the_cpu_a_result_is_sent_before_the_next_plan_is_touched(cpu):
    cpu.send(first())
    cpu.send(first())  # contradicts the slots, so launching it fails
    assert cpu.receive().tokens.tolist() == answers(1)[0]
    cpu.thread.join(WAIT_S)
    assert [str(error) for error in cpu.failure] == ["slot 0 is already bound"]


def test_stop_ends_an_idle_loop(cpu):
    cpu.stop()
    assert cpu.failure == []


def test_stop_waits_for_the_step_in_flight(slow):
    slow.send(first())
    slow.device.await_launches(1)
    slow.send(Stop())
    assert slow.receives_nothing()
    assert slow.thread.is_alive()
    slow.device.end()
    slow.thread.join(WAIT_S)
    assert not slow.thread.is_alive()
    assert slow.failure == []


class RememberingModel(TinyModel):
    """A model that keeps a per-slot tensor from its second pass on."""

    passes = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.memory = torch.zeros(SLOTS) if self.passes > 1 else None
        return super().logits(hidden)


def test_a_per_slot_tensor_that_a_step_keeps_ends_the_worker_and_is_named(tmp_path):
    for bench in start("cpu", tmp_path, RememberingModel()):
        bench.send(first())
        bench.receive()
        bench.send(after(2))
        bench.thread.join(WAIT_S)
        (error,) = bench.failure
        assert "(13,) torch.float32 held by" in str(error)
        assert "RememberingModel" in str(error)
