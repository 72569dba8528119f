"""The engine_core process: command line, logging, signals, exit code.

Exit codes: 0 drained as asked (SIGTERM, SIGINT or a Drain message); 1 our own failure; 2 a bad
command line; 3 the worker was lost. The last line of the log names the cause.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

import msgspec
import zmq

from engine_core.loop import Loop
from engine_core.workers import WorkerLost
from protocol import sockets
from protocol.cluster_key import read_cluster_key
from protocol.config import EngineConfig

log = logging.getLogger("engine_core")

EXIT_FAILED, EXIT_USAGE, EXIT_WORKER_LOST = 1, 2, 3


def main(arguments: list[str] | None = None) -> int:
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(name)s %(message)s",
        datefmt="%H:%M:%S",
    )
    parser = argparse.ArgumentParser(prog="python -m engine_core", description=__doc__)
    parser.add_argument("--config", required=True, help="an EngineConfig as JSON")
    try:
        config = msgspec.json.decode(parser.parse_args(arguments).config, type=EngineConfig)
    except msgspec.MsgspecError as error:
        log.error("bad --config: %s", error)
        return EXIT_USAGE
    return run(msgspec.structs.replace(config, address=config.address or sockets.engine_address()))


def run(config: EngineConfig) -> int:
    """Serve until drained or lost."""
    try:
        key = read_cluster_key(config.cluster_key)
        sockets.check_address(config.address, key)
    except ValueError as error:
        log.error("%s", error)
        return EXIT_USAGE
    sockets.prepare(config.address)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        Loop(config, context, _signals(), key).run()
    except WorkerLost as error:
        log.error("%s", error)
        return EXIT_WORKER_LOST
    except Exception:
        log.exception("the engine failed")
        return EXIT_FAILED
    finally:
        context.term()
    log.info("drained")
    return 0


def _signals() -> int:
    """A file descriptor that becomes readable when we are asked to stop.

    Handlers do nothing else.
    """
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return readable
