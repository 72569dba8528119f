"""The worker process: command line, logging, the conversation with the engine, exit code.

It connects, takes its device, loads, says WorkerReady, then answers each StepPlan with a StepResult
until Stop (loop.py).
Exit codes: protocol/exit_codes.py; a failure is told to the engine as WorkerFailed, too. It never
outlives the engine. torch is imported late, so that its time is told too.
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
from protocol.devices import DeviceTaken
from protocol.exit_codes import ExitCode
from protocol.lifeline import hold_on
from protocol.log_lines import log_to_stderr
from protocol.steps import FromWorker, ToWorker, WorkerFailed
from worker.loading.errors import NotEnoughMemory, UnusableModel
from worker.startup.timing import StartupTiming

log = logging.getLogger("worker")

PARENT_CHECK_MS = 5_000
SEND_WAIT_MS = 30_000
LAST_WORD_MS = 2_000
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
"""How allocators say it: of CUDA, of torch on a CPU."""


def main(arguments: list[str] | None = None) -> int:
    log_to_stderr("worker")
    starter = hold_on(signal.SIGKILL)
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("--config", required=True, help="a WorkerConfig as JSON")
    try:
        config = msgspec.json.decode(parser.parse_args(arguments).config, type=WorkerConfig)
        if not config.address:
            raise ValueError("address is missing: where does the engine await this worker?")
    except (msgspec.MsgspecError, ValueError) as error:
        log.error("bad --config: %s", error)
        starter.send_cause(f"bad --config: {error}")
        return ExitCode.USAGE
    log_to_stderr("worker", config.log_format)
    # Ctrl-C at a terminal reaches us as well; the engine decides when we stop.
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
    """Load, then execute plans until told to stop."""
    gc.disable()  # what loading makes stays: a tenth of its time went into looking for rubbish
    try:
        timing = StartupTiming()
        with timing("import torch"):
            from worker.kv.layout import KVLayout
            from worker.kv.transfer.service import KVTransferService
            from worker.loop import WorkerLoop
            from worker.startup.assembly import assemble
            from worker.startup.device_lock import lock_device
        gc.freeze()  # of a million objects nobody need look at again, whatever is collected later
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock_device(config))
            runner, ready = assemble(config, timing)
            gc.collect()
            gc.freeze()  # what was loaded stays: later collections need not look at it
            gc.enable()
            searches = config.poison_slots != "off"
            layout = KVLayout.of(ready.model, runner.parts.cache)
            exchange = stack.enter_context(
                KVTransferService(config, context, runner.parts.cache, layout)
            )
            loop = stack.enter_context(WorkerLoop(runner, engine, exchange, searches=searches))
            engine.send(replace(ready, kv=exchange.endpoint, kv_tiers=exchange.tiers))
            log.debug("ready in %.1f s", sum(seconds for _, seconds in ready.phases))
            loop.run()
        return 0
    except ParentGone:
        log.error("the engine is gone")
        return ExitCode.FAILED
    except Exception as error:
        code = exit_code_for(error)
        if code is ExitCode.WORKER_LOST:  # of the others, the message says all there is to know
            log.exception("the worker failed")
        else:
            log.error("%s", in_one_line(error))
        engine.send_last_word(WorkerFailed(message=in_one_line(error), exit_code=code))
        return code
    finally:
        engine.close()


def exit_code_for(error: Exception) -> ExitCode:
    """By the errors' own words where torch has no class of its own for one."""
    says_so = any(words in str(error) for words in OUT_OF_MEMORY)
    if says_so or isinstance(error, MemoryError | NotEnoughMemory):
        return ExitCode.OUT_OF_MEMORY
    for kind, code in ((DeviceTaken, ExitCode.IN_USE), (UnusableModel, ExitCode.BAD_MODEL)):
        if isinstance(error, kind):
            return code
    return ExitCode.WORKER_LOST


class ParentGone(Exception):
    """The process that started us has ended."""


class EngineConnection:
    """The engine, as the worker hears it. Waiting costs nothing: a blocking poll, no spinning. What
    has arrived already, and what can be sent at once, is not polled for."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, parent: int) -> None:
        self._socket = sockets.connect_dealer(context, address)
        self._decoder: wire.Decoder[ToWorker] = wire.Decoder(ToWorker)
        self._parent = parent
        self._pollers: dict[tuple[int, ...], zmq.Poller] = {}

    def receive(self) -> ToWorker:
        """The next message. Raises ParentGone where the death signal could not reach us."""
        self.wait()
        return self._decoder.decode(self._socket.recv_multipart())

    def wait(self, *wakeups: int) -> bool:
        """Until there is a message, or until one of the file descriptors can be read; True if there
        is a message. Raises ParentGone as `receive` does."""
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            return True
        poller = self._poller(wakeups)
        while not (ready := dict(poller.poll(PARENT_CHECK_MS))):
            if os.getppid() != self._parent:
                raise ParentGone
        return self._socket in ready

    def _poller(self, wakeups: tuple[int, ...]) -> zmq.Poller:
        """Made once for each set of file descriptors; a worker has one or two."""
        if (poller := self._pollers.get(wakeups)) is None:
            poller = self._pollers[wakeups] = zmq.Poller()
            for source in (self._socket, *wakeups):
                poller.register(source, zmq.POLLIN)
        return poller

    def send(self, message: FromWorker) -> None:
        """Raises ParentGone where nobody takes messages any more."""
        frames = wire.encode(message)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            if not self._socket.poll(SEND_WAIT_MS, zmq.POLLOUT):
                raise ParentGone from None
            self._socket.send_multipart(frames)

    def send_last_word(self, message: FromWorker) -> None:
        """As `send`, but an engine that is gone is not waited for."""
        if self._socket.poll(LAST_WORD_MS, zmq.POLLOUT):
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(wire.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


def in_one_line(error: Exception) -> str:
    """Return the cause for an operator: the first line of the message, or the error's name, and the
    remedy, if there is one."""
    lines = str(error).strip().splitlines()
    said = lines[0] if lines else type(error).__name__
    remedy = error.remedy if isinstance(error, UnusableModel) else ""
    return f"{said}; {remedy}" if remedy else said
