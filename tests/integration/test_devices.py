"""A GPU belongs to one worker, unless all workers on it share it, and errors name the holders. The
tests use real processes, and kill some of them.

No GPU is needed, because the locks depend only on the GPU's name. A worker gets the name from
`worker.device.device.identity_of`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import zmq

from protocol.config.worker import WorkerConfig
from protocol.process.devices import (
    DeviceHolder,
    DeviceInUse,
    claim_device,
    holders_by_device,
    read_holders,
)
from protocol.process.exit_codes import ExitCode
from protocol.process.process_state import is_ending
from protocol.wire import codec, sockets
from protocol.worker.steps import FromWorker, WorkerFailed
from tests.support.processes import ROOT, Program
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.waiting import eventually
from tools.commands.ps import format_found
from tools.processes.discovery import Found, discover

GPU = "gpu-0a1b"
CLAIM = """
import os, sys, time
from pathlib import Path
from protocol.process.devices import DeviceHolder, DeviceInUse, claim_device
base, gate, shares = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "shares"
while not gate.exists():
    time.sleep(0.001)
holder = DeviceHolder(pid=os.getpid(), place="8001", model="small", since=1.7e9, shares=shares)
try:
    claim_device(base, "gpu-0a1b", holder)
except DeviceInUse as error:
    print("refused:", error, flush=True)
else:
    print("holds", flush=True)
    time.sleep(600)
"""
WORKER = """
import sys
from worker.device import device
from worker.process import main
device.identity_of = lambda device: "gpu-0a1b"  # as if the CPU were one
sys.exit(main(sys.argv[1:]))
"""


class DeviceMachine:
    """Starts programs that claim the same device once the file `gate` exists."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.base = folder / f"tidegate-{os.getuid()}" / "devices"
        self.gate = folder / "gate"
        self._stack = stack

    def start(self, *, shares: bool = False) -> Program:
        words = ["-c", CLAIM, str(self.base), str(self.gate), "shares" if shares else "alone"]
        return self._stack.enter_context(Program(words, environment={"PYTHONPATH": str(ROOT)}))

    def holds(self, *, shares: bool = False) -> Program:
        program = self.start(shares=shares)
        self.gate.touch()
        program.line_with("holds")
        return program

    def holders(self) -> list[int]:
        return [holder.pid for holder in read_holders(self.base / GPU)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[DeviceMachine]:
    with ExitStack() as stack:
        yield DeviceMachine(tmp_path, stack)


def ourselves(*, shares: bool = False) -> DeviceHolder:
    return DeviceHolder(pid=os.getpid(), place="9", model="m", since=time.time(), shares=shares)


def test_a_second_program_is_refused_and_the_holder_is_named(machine: DeviceMachine) -> None:
    first = machine.holds()
    with pytest.raises(DeviceInUse) as caught:
        claim_device(machine.base, GPU, ourselves())
    pid = first.process.pid
    assert f"pid {pid} (small on port 8001, since 2023-11-14 22:13:20 UTC)" in caught.value.message
    assert "--device cuda:N" in caught.value.message
    assert "let both share it (--share-device)" in caught.value.message
    with claim_device(machine.base, "gpu-other", ourselves()):
        assert sorted(holders_by_device(machine.base)) == [GPU, "gpu-other"]
    assert sorted(holders_by_device(machine.base)) == [GPU]


def test_a_killed_holder_loses_the_device_and_its_files_are_removed(machine: DeviceMachine) -> None:
    first = machine.holds()
    first.signal(signal.SIGKILL)  # not waited for, so the process may still be ending
    with claim_device(machine.base, GPU, ourselves()):
        assert machine.holders() == [os.getpid()]
        left = [path.name for path in (machine.base / GPU).iterdir() if path.name != "lock"]
        assert len(left) == 1, left
    assert machine.holders() == []


def test_one_of_many_programs_started_at_once_gets_the_device_and_the_others_name_the_holder(
    machine: DeviceMachine,
) -> None:
    programs = [machine.start() for _ in range(5)]
    machine.gate.touch()
    assert eventually(lambda: all(program.out for program in programs), within_s=60)
    (first,) = (program for program in programs if program.out == ["holds"])
    for program in programs:
        if program is not first:
            assert f"in use by pid {first.process.pid} (small" in program.out[0]
    assert machine.holders() == [first.process.pid]


def test_programs_can_share_a_device_only_if_all_of_them_do(machine: DeviceMachine) -> None:
    both = [machine.holds(shares=True), machine.holds(shares=True)]
    assert sorted(machine.holders()) == sorted(program.process.pid for program in both)
    with pytest.raises(DeviceInUse, match=r"UTC, shared\) and pid .*, or share it \("):
        claim_device(machine.base, GPU, ourselves())
    both[0].signal(signal.SIGKILL)
    both[0].process.wait(10)
    with claim_device(machine.base, GPU, ourselves(shares=True)):
        assert sorted(machine.holders()) == sorted([os.getpid(), both[1].process.pid])
    both[1].signal(signal.SIGKILL)
    with (
        claim_device(machine.base, GPU, ourselves()),
        pytest.raises(DeviceInUse, match=r"let both share"),
    ):
        claim_device(machine.base, GPU, ourselves(shares=True))


def test_ps_lists_the_holder_of_each_device(machine: DeviceMachine) -> None:
    first = machine.holds()
    found = discover(machine.base.parent)
    (line,) = (line for line in format_found(found, {}).splitlines() if line.startswith("device"))
    assert line.startswith(f"device   {GPU}: pid {first.process.pid} (small on port 8001, since")
    assert msgspec.json.decode(msgspec.json.encode(found), type=Found) == found


def test_a_device_folder_that_others_can_enter_is_refused(machine: DeviceMachine) -> None:
    machine.base.mkdir(parents=True, mode=0o755)
    machine.base.parent.chmod(0o700)
    with pytest.raises(PermissionError, match="only its owner"):
        claim_device(machine.base, GPU, ourselves())


def test_a_process_is_ending_once_it_is_killed_or_gone() -> None:
    assert not is_ending(os.getpid())
    process = subprocess.Popen(["sleep", "600"])
    assert not is_ending(process.pid)
    process.kill()
    assert eventually(lambda: is_ending(process.pid))  # it has not been waited for
    process.wait()
    assert is_ending(process.pid)


def test_a_worker_whose_gpu_is_in_use_fails_before_it_loads_the_model(
    machine: DeviceMachine, tmp_path: Path
) -> None:
    first = machine.holds()
    address = f"ipc://{machine.base.parent / '8002' / 'w'}"
    model = str(write_tiny_llama(tmp_path))
    config = msgspec.json.encode(WorkerConfig(model=model, address=address)).decode()
    environment = {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path)}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets.make_ipc_directory(address)
    with context, sockets.bind_router(context, address) as socket:
        worker = Program(["-c", WORKER, "--config", config], environment=environment)
        with worker:
            assert socket.poll(60_000), worker.err
            _, *frames = socket.recv_multipart()
            failed: FromWorker = codec.Decoder[FromWorker](FromWorker).decode(frames)
            assert isinstance(failed, WorkerFailed)
            assert failed.exit_code == ExitCode.IN_USE
            assert f"device {GPU} is in use by pid {first.process.pid} (small" in failed.message
            assert worker.process.wait(20) == ExitCode.IN_USE
