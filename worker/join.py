"""`python -P -m worker.join JSON`: a worker that joins the group of an engine on another machine.

JSON is a JoinConfig. The worker asks the engine for a place, gets its settings, and then runs as a
worker that the engine has started (process.py).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import msgspec
import zmq
from msgspec.structs import replace

from protocol.config.worker import JoinConfig, WorkerConfig
from protocol.process.exit_codes import ExitCode
from protocol.process.log_lines import log_to_stderr
from protocol.process.quick_exit import quick_exit
from protocol.wire import sockets
from protocol.wire.cluster_key import read_cluster_key
from protocol.worker.steps import JoinRefused, WorkerJoins, WorkerSettings
from worker.device import environment
from worker.process import run
from worker.service.connection import EngineConnection, EngineWatch, ParentGone

log = logging.getLogger("worker")

JOIN_MS = 5_000
"""A worker asks for a place until it gets an answer, because an engine may be restarted before it
answers."""


def main(text: str) -> int:
    """Run the worker that the JoinConfig `text` describes. Return the exit code."""
    log_to_stderr("worker")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        join = msgspec.json.decode(text, type=JoinConfig)
        log_to_stderr("worker", join.log_format)
        watch = EngineWatch(context, join.join, read_cluster_key(join.cluster_key))
    except (msgspec.MsgspecError, ValueError) as error:
        log.error("bad config: %s", error)
        return ExitCode.USAGE
    try:
        engine = EngineConnection(watch.socket)
        config = ask_for_place(join, engine)
        watch.has_joined.set()
    except (ValueError, ParentGone) as error:
        log.error("%s", error)
        watch.close()
        return ExitCode.USAGE
    else:
        return run(config, context, engine, close=watch.close)
    finally:
        context.term()


def ask_for_place(join: JoinConfig, engine: EngineConnection) -> WorkerConfig:
    """Return the config of the place in the group that the engine assigns. Raises ValueError if
    there is none, or if the engine's config and `join` contradict each other."""
    log.info("joining the engine at %s", join.join)
    engine.send(WorkerJoins(rank=join.rank))
    while not engine.has_message(JOIN_MS):
        engine.send(WorkerJoins(rank=join.rank))
    match engine.receive():
        case WorkerSettings(config=settings):
            config = msgspec.json.decode(settings, type=WorkerConfig)
        case JoinRefused(error=error):
            raise ValueError(f"the engine at {join.join} refuses this worker: {error}")
        case message:
            raise ValueError(f"the engine at {join.join} answered with {type(message).__name__}")
    if join.torchrun_size not in (0, config.world_size):
        raise ValueError(
            f"torchrun starts {join.torchrun_size} workers, and the engine's group has "
            f"{config.world_size}: torchrun must start all of them"
        )
    if bool(config.draft_model) != bool(join.draft_model):
        raise ValueError(
            f"the engine uses the draft model {config.draft_model}: give its place here with "
            "--draft-model"
            if config.draft_model
            else "the engine uses no draft model: leave out --draft-model"
        )
    named = Path(config.model).name
    if named and named != Path(join.model).name:
        log.info("the engine's model is named %s, this one %s", named, Path(join.model).name)
    return replace(
        config,
        model=join.model,
        draft_model=join.draft_model,
        address=join.join,
        log_format=join.log_format,
        device=join.device,
        threads=join.threads or config.threads,
        local_rank=join.local_rank,
        local_size=join.local_size,
        rendezvous=join.rendezvous or sockets.with_host_of(config.rendezvous, join.join),
        libraries=join.libraries,
        measurements=join.measurements,
    )


if __name__ == "__main__":
    environment.prepare()
    quick_exit(main(sys.argv[1]))
