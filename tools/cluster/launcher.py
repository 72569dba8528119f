"""The launcher: performs the actions of `Placement` until the engines have stopped.

Ray places processes and reports their deaths, and does nothing else. Each attempt to run an engine
has a thread (`attempt.py`), and one more thread reads the list of nodes. They post events to the
loop of this module, which waits for nothing else, so a call of Ray that hangs delays no signal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayError

from protocol.config.cluster import ClusterConfig
from tools.cluster.attempt import Attempt, EngineOrder
from tools.cluster.connection import free_resources, living_nodes
from tools.cluster.placement import (
    AskForPlace,
    DrainEngine,
    Placement,
    PlacementAction,
    ReleasePlace,
    WriteList,
)
from tools.cluster.resources import engine_arguments, in_words, resources_of
from tools.processes.actions import EndServer, LogAction

log = logging.getLogger("cluster")

NODES_EVERY_S = 1.0
RELEASE_S = 3.0
"""Seconds at the end in which the places are returned. Ray returns the rest when the launcher has
disconnected."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def write_list(path: Path, addresses: Sequence[str]) -> None:
    """Replace the list of engines at `path`. Its readers see the old one or the new one."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
    os.replace(temporary, path)


class Launcher:
    """Keeps the engines of `config` running, from the connection to Ray until `run` returns.

    environment   variables added to the environment of each engine
    """

    def __init__(self, config: ClusterConfig, environment: Mapping[str, str]) -> None:
        nodes = living_nodes()
        need = resources_of(config, nodes)
        self._file = Path(config.engines_file)
        self._order = EngineOrder(
            need=need,
            arguments=engine_arguments(config, nodes),
            environment=environment,
            key_path=config.cluster_key,
            key=Path(config.cluster_key).read_bytes(),
        )
        self._placement = Placement(
            [f"engine {number}" for number in range(1, config.replicas + 1)],
            need,
            time.monotonic(),
            start_timeout_s=config.start_timeout_s,
            drain_s=config.drain_s,
            restart_limit=config.restart_limit,
        )
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._ending: list[Attempt] = []  # released, but may still have their places
        #: Events, which signal handlers may post, too.
        self._events: queue.SimpleQueue[Callable[[float], list[PlacementAction]]] = (
            queue.SimpleQueue()
        )
        self._is_closed = threading.Event()
        write_list(self._file, ())  # an earlier launcher may have left a list
        self._events.put(partial(self._placement.on_nodes, nodes, free_resources()))
        count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
        log.info("a Ray cluster of %s; each engine gets %s", count, in_words(need))

    def run(self) -> EndServer:
        """Run until the engines have stopped, or until they cannot run. Return how that ended."""
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: self._events.put(self._placement.on_stop))
        at_once = partial(self._placement.on_stop, at_once=True)
        signal.signal(signal.SIGQUIT, lambda *_: self._events.put(at_once))
        threading.Thread(target=self._watch_nodes, name="nodes", daemon=True).start()
        while True:
            actions = []
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=self._timeout())
                actions = event(time.monotonic())
            actions += self._placement.tick(time.monotonic())
            if (end := self._perform(actions)) is not None:
                self._close()
                return end

    def _timeout(self) -> float | None:
        deadline = self._placement.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _perform(self, actions: Sequence[PlacementAction]) -> EndServer | None:
        """Perform the actions. Return the last one if the launcher ends."""
        for action in actions:
            match action:
                case AskForPlace(engine, attempt):
                    self._attempts[engine, attempt] = Attempt(
                        action, self._order, self._placement, self._events.put
                    )
                case DrainEngine(engine, attempt):
                    self._attempts[engine, attempt].drain()
                case ReleasePlace(engine, attempt):
                    ended = self._attempts.pop((engine, attempt))
                    ended.release()
                    self._ending = [ended, *(each for each in self._ending if each.is_alive)]
                case WriteList(addresses):
                    write_list(self._file, addresses)
                case LogAction(text, is_failure):
                    log.log(logging.WARNING if is_failure else logging.INFO, "%s", text)
                case EndServer():
                    return action
        return None

    def _watch_nodes(self) -> None:
        while not self._is_closed.wait(NODES_EVERY_S):
            with contextlib.suppress(RayError):
                nodes, free = living_nodes(), free_resources()
                self._events.put(partial(self._placement.on_nodes, nodes, free))

    def _close(self) -> None:
        self._is_closed.set()
        give_up_at = time.monotonic() + RELEASE_S
        for attempt in self._ending:
            attempt.join(max(0.0, give_up_at - time.monotonic()))
        ray.shutdown()
