"""Decides where and when the engines of `tidegate serve --cluster` run. It calls no part of Ray.

Its input is events: the nodes of the cluster, a place was reserved, an engine is ready or lost, a
stop signal arrived, time passed. Its output is actions. `tools.cluster.launcher` performs them. The
current time is an argument. These rules hold in addition to the table of states:

- Engines are spread: each asks for a place on the node that has the fewest of them. If that node
  has no room within SPREAD_S, any other node will do.
- A node that does not answer after the loss of its engine is avoided for SUSPECT_S. Ray needs
  longer than the engine's clients to find that a node is dead.
- A lost node does not count against an engine. An engine that is lost otherwise is restarted as
  `tools.processes.restart_policy` says.
- Before any engine has been ready, the first failure of an engine ends the launcher, because the
  others would fail for the same reason.
- While an engine runs or starts, others may wait for a place forever. If none does, the launcher
  gives up after `start_timeout_s`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.process.exit_codes import ExitCode
from tools.cluster.placement_states import (
    PLACED,
    PlacedEngine,
    PlacementEvent,
    PlacementState,
    PlaceWish,
)
from tools.cluster.resources import ClusterNode, Resources, free_in_words, in_words
from tools.processes.actions import EndServer, LogAction
from tools.processes.restart_policy import RestartPolicy

SPREAD_S = 3.0
"""Seconds that an engine waits for room on the node with the fewest engines."""
SUSPECT_S = 20.0
"""Seconds for which a node that may be dead is avoided. Then Ray knows whether it is."""
HINT_S = 10.0
"""Seconds after which the wait for a place is logged."""
DRAIN_GRACE_S = 3.0
"""Seconds that the engines have to exit in a drain, after the time limit of their requests. The
supervisor of the launcher allows a little more."""


@dataclass(frozen=True, slots=True)
class AskForPlace:
    """The action to ask Ray for a place, and to run and watch the engine there."""

    engine: str
    attempt: int
    wish: PlaceWish


@dataclass(frozen=True, slots=True)
class DrainEngine:
    """The action to let the engine finish its open requests and exit."""

    engine: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ReleasePlace:
    """The action to end an attempt: return its place, which kills an engine that still runs."""

    engine: str
    attempt: int


@dataclass(frozen=True, slots=True)
class WriteList:
    """The action to write the addresses of the engines that serve."""

    addresses: tuple[str, ...]


PlacementAction = AskForPlace | DrainEngine | ReleasePlace | WriteList | LogAction | EndServer


@dataclass(frozen=True, slots=True)
class EngineLoss:
    """The end of an attempt to run an engine."""

    #: The cause, as a clause: "the engine exited with code 1".
    cause: str
    #: Exit code of the engine, or the negative number of a signal; None: not reported.
    code: int | None = None
    #: Whether its node did not answer, either.
    is_node_suspect: bool = False


class Placement:
    """The engines of one launcher. Times are in seconds of any monotonic clock.

    engines           their names, for logs
    need              the resources of each engine
    start_timeout_s   limit of the wait for a place if no engine serves, and of each start
    drain_s           time that the engines have to finish their open requests
    restart_limit     limit of a `RestartPolicy`
    """

    def __init__(
        self,
        engines: Sequence[str],
        need: Resources,
        now: float,
        *,
        start_timeout_s: float,
        drain_s: float,
        restart_limit: int,
    ) -> None:
        self._engines = {
            name: PlacedEngine(name, RestartPolicy(restart_limit), since=now) for name in engines
        }
        self._need = need
        self._start_timeout_s, self._drain_s = start_timeout_s, drain_s
        self._nodes: dict[str, ClusterNode] = {}
        self._free: Resources = {}
        self._suspects: dict[str, float] = {}  # node id -> until when it is avoided
        self._listed: tuple[str, ...] = ()
        self._has_served = False
        self._stop_deadline: float | None = None  # of the drain; None: not stopping
        self._is_over = False

    def state(self, engine: str) -> PlacementState:
        return self._engines[engine].state

    def attempt(self, engine: str) -> int:
        return self._engines[engine].attempt

    @property
    def deadline(self) -> float | None:
        """The time at which `tick` must be called; None if nothing is pending."""
        if self._is_over:
            return None
        times = [self._stop_deadline, *(each.deadline for each in self._engines.values())]
        for each in self._in_states(PlacementState.WAITING):
            hint = None if each.is_hinted else each.since + HINT_S
            spread = each.since + SPREAD_S if each.wish and each.wish.target else None
            times += [each.since + self._start_timeout_s, hint, spread]
            times += self._suspects.values()
        return min((time for time in times if time is not None), default=None)

    # ---- events

    def on_nodes(
        self, nodes: Iterable[ClusterNode], free: Resources, now: float
    ) -> list[PlacementAction]:
        """Handle the list of living nodes. Call this at the start, and once a second or so.

        free   resources of the whole cluster that are not in use
        """
        self._nodes = {node.id: node for node in nodes}
        self._free = free
        return self.tick(now)

    def on_placed(self, engine: str, attempt: int, node: str, now: float) -> list[PlacementAction]:
        """Record that Ray has reserved a place for an engine on the node with the id `node`."""
        each = self._current(engine, attempt)
        if each is None:
            return []
        each.change(PlacementEvent.PLACED, now + self._start_timeout_s)
        each.node = node
        return [LogAction(f"{engine} starts on the node {self._ip(node)}")]

    def on_ready(
        self, engine: str, attempt: int, address: str, now: float
    ) -> list[PlacementAction]:
        """Record that an engine accepts requests at `address`, and list it for the gateways."""
        each = self._current(engine, attempt)
        if each is None or each.state is PlacementState.STOPPING:
            return []
        each.change(PlacementEvent.READY)
        each.address, self._has_served = address, True
        return [LogAction(f"{engine} is ready at {address}"), *self._write_list()]

    def on_lost(
        self, engine: str, attempt: int, loss: EngineLoss, now: float
    ) -> list[PlacementAction]:
        """Record that an attempt to run an engine has ended, and decide whether to try again."""
        each = self._current(engine, attempt)
        return [] if each is None else [*self._lose(each, loss, now), *self.tick(now)]

    def on_stop(self, now: float, *, at_once: bool = False) -> list[PlacementAction]:
        """Handle a stop signal: drain the engines, or kill them at once."""
        if self._is_over:
            return []
        if at_once:
            return self._end(ExitCode.OK, "")
        if self._stop_deadline is not None:
            return []
        self._stop_deadline = now + self._drain_s + DRAIN_GRACE_S
        actions: list[PlacementAction] = []
        for each in self._engines.values():
            if each.state is PlacementState.STOPPED:
                continue
            had_place = each.state in PLACED
            if not had_place:
                actions += self._release(each)
            each.change(PlacementEvent.STOP)
            if had_place:
                actions.append(DrainEngine(each.name, each.attempt))
        return actions + self._write_list() + self._end_if_stopped()

    def tick(self, now: float) -> list[PlacementAction]:
        """Do what is due. Call this at `deadline`; earlier calls do nothing."""
        if self._is_over:
            return []
        if self._stop_deadline is not None:
            if now < self._stop_deadline:
                return []
            late = " and ".join(each.name for each in self._in_states(PlacementState.STOPPING))
            return self._end(ExitCode.FAILED, f"{late} did not stop in time and will be killed")
        self._suspects = {node: until for node, until in self._suspects.items() if until > now}
        actions: list[PlacementAction] = []
        for each in self._in_states(PlacementState.STARTING):
            if each.deadline is not None and each.deadline <= now:
                cause = f"{each.name} was not ready after {self._start_timeout_s:g} s"
                actions += self._lose(each, EngineLoss(cause, ExitCode.NOT_READY), now)
                if self._is_over:
                    return actions
        for each in self._in_states(PlacementState.LOST):
            if each.deadline is not None and each.deadline <= now:
                each.change(PlacementEvent.RETRY)
                each.since, each.wish, each.is_hinted = now, None, False
        for each in self._in_states(PlacementState.WAITING):
            actions += self._wait(each, now)
            if self._is_over:
                break
        return actions

    # ---- places

    def _wait(self, each: PlacedEngine, now: float) -> list[PlacementAction]:
        """Ask for a place, if that was not done yet or if other nodes have to be asked for. Log a
        long wait, and give up after a too long one."""
        if now >= each.since + self._start_timeout_s:
            if not self._has_engines:
                cause = f"no place for {each.name} after {self._start_timeout_s:g} s"
                more = "--start-timeout-s allows more"
                return self._end(ExitCode.NOT_READY, f"{cause}; {self._shortage()}; {more}")
            each.since, each.is_hinted = now, False
        actions: list[PlacementAction] = []
        wish = self._wish(each, now)
        if wish != each.wish:
            actions += self._release(each)
            each.attempt, each.wish = each.attempt + 1, wish
            actions.append(AskForPlace(each.name, each.attempt, wish))
        if not each.is_hinted and now >= each.since + HINT_S:
            each.is_hinted = True
            actions.append(LogAction(f"{each.name} waits for a place; {self._shortage()}"))
        return actions

    def _wish(self, each: PlacedEngine, now: float) -> PlaceWish:
        """Return which nodes to ask for now."""
        usable = [node for node in self._nodes.values() if node.id not in self._suspects]
        if now < each.since + SPREAD_S:
            if each.wish and any(node.id == each.wish.target for node in usable):
                return each.wish
            if target := self._least_used(each, usable):
                return PlaceWish(target)
        return PlaceWish(avoided=frozenset(self._suspects.keys() & self._nodes.keys()))

    def _least_used(self, each: PlacedEngine, nodes: Iterable[ClusterNode]) -> str:
        """Return the node with the fewest engines of those that could hold one more; "" if there is
        none."""
        used = dict.fromkeys(self._nodes, 0)
        for other in self._engines.values():
            node = other.node
            if other.state is PlacementState.WAITING and other.wish:
                node = other.wish.target
            if other is not each and node in used:
                used[node] += 1
        roomy = [node for node in nodes if node.capacity(self._need) > used[node.id]]
        return min(roomy, key=lambda node: (used[node.id], node.id)).id if roomy else ""

    def _release(self, each: PlacedEngine) -> list[PlacementAction]:
        """Return the action that ends the present attempt, if there is one."""
        if each.wish is None:
            return []
        each.wish = None
        return [ReleasePlace(each.name, each.attempt)]

    # ---- losses

    def _lose(self, each: PlacedEngine, loss: EngineLoss, now: float) -> list[PlacementAction]:
        actions = self._release(each)
        if each.state is PlacementState.STOPPING:
            each.change(PlacementEvent.LOST)
            if loss.code not in (None, ExitCode.OK, -signal.SIGTERM):
                actions.append(LogAction(f"while stopping, {loss.cause}", is_failure=True))
            return actions + self._end_if_stopped()
        is_node_lost = loss.is_node_suspect and bool(each.node)
        if is_node_lost:
            self._suspects[each.node] = now + SUSPECT_S
        each.change(PlacementEvent.LOST)
        # The port of an engine may be taken between its choice and its use. Another one is chosen
        # next time.
        is_chance = loss.code in (None, ExitCode.IN_USE)
        code = ExitCode.FAILED if loss.code is None or is_chance or loss.code <= 0 else loss.code
        if not (self._has_served or is_chance):
            return [*actions, *self._end(code, loss.cause)]
        delay_s = 0.0 if is_node_lost else each.restarts.delay(code, code, now)
        if delay_s is None:
            each.change(PlacementEvent.GIVE_UP)
            cause = f"{loss.cause}{each.restarts.why_not}"
            log = LogAction(f"{cause}; {each.name} stays down", is_failure=True)
            ends = self._end_if_stopped(code, cause)
            return [*actions, log, *self._write_list(), *ends]
        each.deadline = now + delay_s
        when = f"in {delay_s:g} s" if delay_s else "now"
        log = LogAction(f"{loss.cause}; {each.name} is placed again {when}", is_failure=True)
        return [*actions, log, *self._write_list()]

    # ---- helpers

    def _current(self, engine: str, attempt: int) -> PlacedEngine | None:
        """Return the engine; None if the attempt is over."""
        each = self._engines[engine]
        is_current = each.wish is not None and each.attempt == attempt
        return each if is_current and not self._is_over else None

    def _in_states(self, *states: PlacementState) -> list[PlacedEngine]:
        return [each for each in self._engines.values() if each.state in states]

    @property
    def _has_engines(self) -> bool:
        return bool(self._in_states(PlacementState.STARTING, PlacementState.READY))

    def _ip(self, node: str) -> str:
        return self._nodes[node].ip if node in self._nodes else node

    def _shortage(self) -> str:
        """Return what an engine needs and what the cluster has, as text."""
        free = free_in_words(self._need, self._free, self._nodes.values())
        count = len(self._nodes)
        nodes = "1 node" if count == 1 else f"{count} nodes"
        return f"it needs {in_words(self._need)} on one node; free: {free}, on {nodes}"

    def _write_list(self) -> list[PlacementAction]:
        """Return the action that writes the list of engines, if it has changed."""
        ready = tuple(each.address for each in self._in_states(PlacementState.READY))
        if ready == self._listed:
            return []
        self._listed = ready
        return [WriteList(ready)]

    def _end_if_stopped(self, code: int = ExitCode.OK, cause: str = "") -> list[PlacementAction]:
        is_stopped = all(e.state is PlacementState.STOPPED for e in self._engines.values())
        return self._end(code, cause) if is_stopped else []

    def _end(self, code: int, cause: str) -> list[PlacementAction]:
        """End the launcher, which returns all places."""
        self._is_over = True
        releases = [action for each in self._engines.values() for action in self._release(each)]
        return [*releases, EndServer(code, cause)]
