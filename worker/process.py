"""The worker process: command line, logging, connection to the engine, exit code.

It connects, loads the model and executes plans (execution.py). Exit codes are in
protocol/process/exit_codes.py; a failure is also sent to the engine as WorkerFailed. The worker
never outlives the engine. torch is imported late, so that its import time is part of the reported
phases.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
from collections.abc import Callable

import msgspec
import zmq

from protocol.config.worker import WorkerConfig
from protocol.process.devices import DeviceInUse
from protocol.process.exit_codes import ExitCode
from protocol.process.lifeline import attach_to_parent
from protocol.process.log_lines import log_to_stderr
from protocol.process.process_title import set_title
from protocol.process.start_gate import wait_at_gate
from protocol.wire import sockets
from protocol.worker.steps import WorkerFailed
from worker.device.timing import StartupTiming
from worker.errors import NotEnoughMemory, PeerLost, UnusableModel
from worker.service.connection import EngineConnection, ParentGone

log = logging.getLogger("worker")

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
        engine = EngineConnection(sockets.connect_dealer(context, config.address), parent)
        return run(config, context, engine, close=engine.close)
    finally:
        context.term()


def run(
    config: WorkerConfig,
    context: zmq.Context[zmq.Socket[bytes]],
    engine: EngineConnection,
    *,
    close: Callable[[], None],
) -> int:
    """Load the model, then execute plans until Stop. Return the exit code.

    close   closes the connection to the engine
    """
    set_title(f"worker {config.rank}")
    gc.disable()  # loading creates no garbage; collections took a tenth of its time
    try:
        timing = StartupTiming()
        with timing("import torch"):
            from worker.service.execution import load_and_execute
        gc.freeze()  # later collections skip the million objects that the imports created
        wait_at_gate()
        load_and_execute(config, context, engine, timing)
        return 0
    except ParentGone:
        log.error("the engine has exited")
        return ExitCode.FAILED
    except Exception as error:
        code, is_consequence = exit_code_for(error), isinstance(error, PeerLost)
        if code is ExitCode.WORKER_LOST and not is_consequence:
            log.exception("the worker failed")
        else:  # the message is enough
            log.error("%s", one_line(error))
        engine.send_final(
            WorkerFailed(
                message=one_line(error),
                rank=config.rank,
                exit_code=code,
                is_consequence=is_consequence,
            )
        )
        return code
    finally:
        close()


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


def one_line(error: Exception) -> str:
    """Return the first line of the error's message, and the remedy if there is one. An error
    without a message is described by its class name."""
    lines = str(error).strip().splitlines()
    cause = lines[0] if lines else type(error).__name__
    remedy = error.remedy if isinstance(error, UnusableModel) else ""
    return f"{cause}; {remedy}" if remedy else cause
