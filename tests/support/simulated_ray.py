"""A Ray cluster as the launcher sees it, simulated: nodes, places on them, and engines in places.

`SimulatedRay` performs the actions of a `Placement`, and checks that they make sense: an engine has
at most one place, and each place is returned. Tests move the time and cause the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tools.cluster.placement import (
    AskForPlace,
    DrainEngine,
    EngineLoss,
    Placement,
    PlacementAction,
    ReleasePlace,
    WriteList,
)
from tools.cluster.resources import CPU, ClusterNode
from tools.processes.actions import EndServer, LogAction

NEED = {CPU: 4.0}


@dataclass
class SimulatedPlace:
    """A request for a place, which has a node once it is granted."""

    asked: AskForPlace
    node: str = ""
    is_ready: bool = False
    drains: bool = False

    @property
    def address(self) -> str:
        return f"tcp://{self.node}:{self.asked.attempt}"


class SimulatedRay:
    """The cluster, and the placement that it tests.

    cpus     CPUs of each node, by id
    places   the places of the engines that have asked for one
    listed   the last list of engines that was written
    logs     all log lines
    end      the last action, if there was one
    """

    def __init__(self, cpus: dict[str, float], engines: int = 2, **options: Any) -> None:
        self.now = 1000.0
        self.cpus = dict(cpus)
        self.places: dict[str, SimulatedPlace] = {}
        self.listed: tuple[str, ...] = ()
        self.logs: list[str] = []
        self.end: EndServer | None = None
        names = [f"engine {number}" for number in range(1, engines + 1)]
        limits: dict[str, Any] = {"start_timeout_s": 100.0, "drain_s": 10.0, "restart_limit": 3}
        self.placement = Placement(names, NEED, self.now, **(limits | options))
        self.report_nodes()

    def perform(self, actions: Iterable[PlacementAction]) -> None:
        for action in actions:
            assert self.end is None, "an action after the end"
            match action:
                case AskForPlace(engine):
                    assert engine not in self.places, "an engine has asked twice"
                    self.places[engine] = SimulatedPlace(action)
                case ReleasePlace(engine, attempt):
                    place = self.places.pop(engine)
                    assert place.asked.attempt == attempt, "another attempt was released"
                case DrainEngine(engine, attempt):
                    assert self.places[engine].asked.attempt == attempt
                    self.places[engine].drains = True
                case WriteList(addresses):
                    assert addresses != self.listed, "the same list was written again"
                    self.listed = addresses
                case LogAction(text):
                    self.logs.append(text)
                case EndServer():
                    self.end = action

    # ---- events

    def report_nodes(self) -> None:
        nodes = [ClusterNode(name, name, {CPU: cpus}) for name, cpus in self.cpus.items()]
        free = {CPU: sum(self.free(name) for name in self.cpus)}
        self.perform(self.placement.on_nodes(nodes, free, self.now))

    def wait(self, seconds: float) -> None:
        """Let time pass. The placement is called whenever it has asked for that."""
        until = self.now + seconds
        while self.end is None:
            due = self.placement.deadline
            if due is None or due > until:
                break
            assert due >= self.now, "the deadline is in the past: the launcher would spin"
            self.now = due
            self.perform(self.placement.tick(self.now))
            assert self.placement.deadline != due, "the deadline does not move"
        self.now = until

    def grant(self) -> list[str]:
        """Grant the places for which there is room. Return the names of the engines."""
        granted = []
        for name, place in list(self.places.items()):
            node = "" if place.node else self._room(place)
            if node:
                place.node = node
                event = self.placement.on_placed
                self.perform(event(name, place.asked.attempt, node, self.now))
                granted.append(name)
        return granted

    def start(self, *names: str) -> None:
        """Let the engines that have a place become ready; all if there are no `names`."""
        for name in names or list(self.places):
            place = self.places[name]
            if place.node and not place.is_ready:
                place.is_ready = True
                event = self.placement.on_ready
                self.perform(event(name, place.asked.attempt, place.address, self.now))

    def lose(self, name: str, code: int | None = None, cause: str = "it failed") -> None:
        """Lose an engine. If `code` is None, its node does not answer."""
        attempt = self.places[name].asked.attempt
        loss = EngineLoss(cause, code, is_node_suspect=code is None)
        self.perform(self.placement.on_lost(name, attempt, loss, self.now))

    def kill_node(self, name: str, *, is_known: bool = False) -> None:
        """Kill a node, and lose the engines on it. Ray's list of nodes shows that if `is_known`."""
        del self.cpus[name]
        if is_known:
            self.report_nodes()
        for engine, place in list(self.places.items()):
            if place.node == name:
                self.lose(engine)

    def stop(self, *, at_once: bool = False) -> None:
        self.perform(self.placement.on_stop(self.now, at_once=at_once))

    # ---- facts

    def free(self, node: str) -> float:
        used = sum(place.node == node for place in self.places.values())
        return self.cpus[node] - NEED[CPU] * used

    def nodes(self) -> list[str]:
        """Return the node of each engine that has a place, in alphabetical order."""
        return sorted(place.node for place in self.places.values() if place.node)

    def _room(self, place: SimulatedPlace) -> str:
        wish = place.asked.wish
        allowed: Sequence[str] = [wish.target] if wish.target else sorted(self.cpus)
        usable = [name for name in allowed if name in self.cpus and name not in wish.avoided]
        return next((name for name in usable if self.free(name) >= NEED[CPU]), "")
