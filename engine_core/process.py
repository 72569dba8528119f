"""Entry point of the engine process: command line, logging, signals, exit code.

The exit codes are declared in protocol/process/exit_codes.py. The code is 0 if the engine was
drained on request (SIGTERM, SIGINT or a Drain message) or stopped by SIGQUIT. The last log line
names the cause. The engine also drains when its parent process has ended.

The worker takes longest to start, so this module imports only what is needed to start it. The
engine itself is imported after that.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from engine_core.connections.event_publisher import EventPublisher
from engine_core.workers.link import WorkerLink
from engine_core.workers.process import StoppedBySignal, WorkerLost
from protocol.config.engine import EngineConfig
from protocol.process.exit_codes import DRAINED, ExitCode
from protocol.process.imports import without_collections
from protocol.process.lifeline import attach_to_parent
from protocol.process.log_lines import log_to_stderr
from protocol.process.process_title import set_title
from protocol.process.start_gate import wait_at_gate
from protocol.wire import sockets
from protocol.wire.cluster_key import read_cluster_key

if TYPE_CHECKING:
    from engine_core.journal.file import Writer

log = logging.getLogger("engine_core")


def main(arguments: list[str] | None = None) -> int:
    log_to_stderr("engine")
    parser = argparse.ArgumentParser(prog="python -m engine_core", description=__doc__)
    parser.add_argument("--config", required=True, help="an EngineConfig as JSON")
    parser.add_argument("--title", default="engine", help="what ps shows, such as engine 2")
    options = parser.parse_args(arguments)
    set_title(options.title)
    try:
        config = msgspec.json.decode(options.config, type=EngineConfig)
    except msgspec.MsgspecError as error:
        log.error("bad --config: %s", error)
        return ExitCode.USAGE
    log_to_stderr("engine", config.log_format)
    return run(msgspec.structs.replace(config, address=config.address or sockets.engine_address()))


def run(config: EngineConfig) -> int:
    """Serve until the engine is drained, stopped or fails, and return the exit code."""
    wakeup = _catch_signals()
    parent = attach_to_parent(signal.SIGTERM)

    def fail(cause: str, code: int) -> int:
        log.error("%s", cause)
        parent.send_cause(cause)
        return code

    try:
        key = read_cluster_key(config.cluster_key)
        sockets.check_address(config.address, key)
        if config.worker_address:
            sockets.check_address(config.worker_address, key)
        journal = _open_journal(config)
    except (ValueError, OSError) as error:
        return fail(str(error), ExitCode.USAGE)
    sockets.make_ipc_directory(config.address)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        publisher = EventPublisher.from_config(config, context)
    except (ValueError, OSError) as error:
        return fail(str(error), ExitCode.USAGE)
    try:
        address = config.worker.address or f"{config.address}.worker"
        worker = WorkerLink(context, config, address, key)
        try:
            # Imported while the worker imports torch, so that the worker starts sooner.
            with without_collections():
                from engine_core.loop import EngineLoop

            loop = EngineLoop(config, context, wakeup, worker, key, journal, publisher)
            loop.run()
        finally:
            worker.stop()
    except WorkerLost as error:
        return fail(str(error), error.exit_code)
    except StoppedBySignal as error:
        loop.restore.on_clean_end(is_supervised=parent.is_connected)
        log.info("%s", error)
        return ExitCode.OK
    except Exception as error:
        log.exception("the engine failed")
        parent.send_cause(f"{type(error).__name__}: {error}")
        return ExitCode.FAILED
    finally:
        if publisher is not None:
            publisher.close()
        context.term()
        if journal is not None:
            journal.close()
    loop.restore.on_clean_end(is_supervised=parent.is_connected)
    log.info("%s%s", DRAINED, loop.drained_by)
    parent.send_cause(f"{DRAINED}{loop.drained_by}")
    return ExitCode.OK


def _open_journal(config: EngineConfig) -> Writer | None:
    """Open the journal, if there is to be one. Raises OSError."""
    if not config.journal:
        return None
    from engine_core.journal.file import Writer  # it imports the whole engine

    wait_at_gate()  # a new file removes an old one, which a refused model must not do
    journal = Writer(Path(config.journal), config.journal_mib << 20)
    log.info("journal: %s", journal.path)
    return journal


def _catch_signals() -> int:
    """Catch the stop signals, and return a file descriptor from which their numbers can be read.

    Each signal adds one byte, its number. The loop stops at once on SIGQUIT, and drains on SIGTERM
    and SIGINT.
    """
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)
    return readable
