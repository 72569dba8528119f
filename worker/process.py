"""The worker process: command line, logging, connection to the engine, exit code.

It connects, locks its device, sends TokenizerRead, loads the model, sends WorkerReady, and then
answers each StepPlan with a StepResult until Stop (loop.py). Exit codes are in
protocol/exit_codes.py; a failure is also sent to the engine as WorkerFailed. The worker never
outlives the engine. torch is imported late, so that its import time is part of the reported phases.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal

import msgspec
import zmq
from msgspec.structs import replace

from protocol import sockets, wire
from protocol.config.worker import WorkerConfig
from protocol.devices import DeviceInUse
from protocol.exit_codes import ExitCode
from protocol.lifeline import attach_to_parent
from protocol.log_lines import log_to_stderr
from protocol.start_gate import wait_at_gate
from protocol.steps import FromWorker, ToWorker, WorkerFailed
from worker.loading.errors import NotEnoughMemory, UnusableModel
from worker.startup.timing import StartupTiming

log = logging.getLogger("worker")

PARENT_CHECK_MS = 5_000
SEND_WAIT_MS = 30_000
FINAL_SEND_MS = 2_000
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
"""Texts by which an out-of-memory error of torch's allocators, on CUDA or a CPU, is recognised."""


def main(arguments: list[str] | None = None) -> int:
    log_to_stderr("worker")
    starter = attach_to_parent(signal.SIGKILL)
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("--config", required=True, help="a WorkerConfig as JSON")
    try:
        config = msgspec.json.decode(parser.parse_args(arguments).config, type=WorkerConfig)
        if not config.address:
            raise ValueError("address is missing: the worker needs its engine's address")
    except (msgspec.MsgspecError, ValueError) as error:
        log.error("bad --config: %s", error)
        starter.send_cause(f"bad --config: {error}")
        return ExitCode.USAGE
    log_to_stderr("worker", config.log_format)
    # Ctrl-C at a terminal reaches the worker too; the engine decides when it stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        return run(config, context, EngineConnection(context, config.address, parent))
    finally:
        context.term()


def run(
    config: WorkerConfig, context: zmq.Context[zmq.Socket[bytes]], engine: EngineConnection
) -> int:
    """Load the model, then execute plans until Stop. Return the exit code."""
    gc.disable()  # loading creates no garbage; collections took a tenth of its time
    try:
        timing = StartupTiming()
        with timing("import torch"):
            from worker.kv.layout import KVLayout
            from worker.kv.transfer.service import KVTransferService
            from worker.loop import WorkerLoop
            from worker.startup.assembly import assemble
            from worker.startup.device import lock_device
        gc.freeze()  # later collections skip the million objects that the imports created
        wait_at_gate()
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock_device(config))
            runner, ready = assemble(config, timing, on_tokenizer=engine.send)
            gc.collect()
            gc.freeze()  # later collections skip what was loaded
            gc.enable()
            layout = KVLayout.from_cache(ready.model, runner.components.cache)
            kv_transfers = stack.enter_context(
                KVTransferService(
                    config, context, runner.components.cache, layout, ready.model.numerics
                )
            )
            loop = stack.enter_context(WorkerLoop(runner, engine, kv_transfers))
            ready = replace(ready, kv=kv_transfers.endpoint, kv_tiers=kv_transfers.tiers)
            engine.send(replace(ready, kv_report=kv_transfers.report()))
            log.debug("ready in %.1f s", sum(seconds for _, seconds in ready.phases))
            loop.run()
        return 0
    except ParentGone:
        log.error("the engine has exited")
        return ExitCode.FAILED
    except Exception as error:
        code = exit_code_for(error)
        if code is ExitCode.WORKER_LOST:  # for other codes the message is enough
            log.exception("the worker failed")
        else:
            log.error("%s", one_line(error))
        engine.send_final(WorkerFailed(message=one_line(error), exit_code=code))
        return code
    finally:
        engine.close()


def exit_code_for(error: Exception) -> ExitCode:
    """Return the exit code for an error. torch has no common class for its out-of-memory errors, so
    they are recognised by their text."""
    is_out_of_memory = any(words in str(error) for words in OUT_OF_MEMORY)
    if is_out_of_memory or isinstance(error, MemoryError | NotEnoughMemory):
        return ExitCode.OUT_OF_MEMORY
    for kind, code in ((DeviceInUse, ExitCode.IN_USE), (UnusableModel, ExitCode.BAD_MODEL)):
        if isinstance(error, kind):
            return code
    return ExitCode.WORKER_LOST


class ParentGone(Exception):
    """Raised if the engine process, which started this one, has ended or no longer reads."""


class EngineConnection:
    """The worker's connection to the engine. It polls the socket only if no message has arrived
    yet, or if a send would block."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, parent: int) -> None:
        self._socket = sockets.connect_dealer(context, address)
        self._decoder: wire.Decoder[ToWorker] = wire.Decoder(ToWorker)
        self._parent = parent
        self._pollers: dict[tuple[int, ...], zmq.Poller] = {}

    def receive(self) -> ToWorker:
        """Return the next message. Raises ParentGone if the engine has ended."""
        self.wait()
        return self._decoder.decode(self._socket.recv_multipart())

    def wait(self, *wakeups: int) -> bool:
        """Wait for a message, or until one of the file descriptors is readable. Return whether
        there is a message. Raises ParentGone if the engine has ended."""
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            return True
        poller = self._poller(wakeups)
        while not (ready := dict(poller.poll(PARENT_CHECK_MS))):
            if os.getppid() != self._parent:
                raise ParentGone
        return self._socket in ready

    def _poller(self, wakeups: tuple[int, ...]) -> zmq.Poller:
        """Return a poller of the socket and these file descriptors. The poller is created at its
        first use."""
        if (poller := self._pollers.get(wakeups)) is None:
            poller = self._pollers[wakeups] = zmq.Poller()
            for source in (self._socket, *wakeups):
                poller.register(source, zmq.POLLIN)
        return poller

    def send(self, message: FromWorker) -> None:
        """Send a message. Raises ParentGone if the engine reads nothing for SEND_WAIT_MS."""
        frames = wire.encode(message)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            if not self._socket.poll(SEND_WAIT_MS, zmq.POLLOUT):
                raise ParentGone from None
            self._socket.send_multipart(frames)

    def send_final(self, message: FromWorker) -> None:
        """Send a last message. Give up if the engine reads nothing for FINAL_SEND_MS."""
        if self._socket.poll(FINAL_SEND_MS, zmq.POLLOUT):
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(wire.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


def one_line(error: Exception) -> str:
    """Return the first line of the error's message, and the remedy if there is one. An error
    without a message is described by its class name."""
    lines = str(error).strip().splitlines()
    cause = lines[0] if lines else type(error).__name__
    remedy = error.remedy if isinstance(error, UnusableModel) else ""
    return f"{cause}; {remedy}" if remedy else cause
