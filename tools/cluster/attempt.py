"""One attempt to run an engine on a Ray cluster, in a thread: place it, start it, watch it.

The engine is watched in two ways, because each alone is too slow or says too little:

- The actor reports the exit of its engine, with the cause, and Ray reports the death of the actor.
  If a node dies, Ray needs about twelve seconds to find out.
- A client of the engine notices a broken connection at once, and silence after `LEASE_S` seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from protocol.process.exit_codes import ExitCode
from protocol.sdk.client import Client
from protocol.wire.errors import EngineError, EngineNotReady
from tools.cluster.actor import CONCURRENT_CALLS, EngineRunner
from tools.cluster.connection import first_line, free_resources, living_nodes
from tools.cluster.placement import AskForPlace, EngineLoss, Placement, PlacementAction
from tools.cluster.placement_states import PlaceWish
from tools.cluster.resources import CPU, GPU, Resources
from tools.processes.children import last_error_line

PLACE_POLL_S = 0.2
CONNECT_S = 1.0
CHECK_EVERY_S = 0.5
REPORT_S = 2.5
"""Seconds after a lost connection in which the actor must report the engine's exit. Then the node
is considered lost, too. Calls of an actor on a dead node fail after about two seconds."""
NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""

Post = Callable[[Callable[[float], list[PlacementAction]]], object]
"""Passes an event to the launcher's loop: a method of `Placement` that lacks only the time."""


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """The settings that all engines of a launcher share."""

    need: Resources
    #: Arguments of `tidegate engine`, without address and key.
    arguments: Sequence[str]
    environment: Mapping[str, str]
    #: The file with the cluster key, on the launcher's host.
    key_path: str
    key: bytes


class _ReleasedError(Exception):
    """The launcher has ended the attempt."""


class Attempt:
    """An attempt to run one engine. It posts `on_placed`, `on_ready` and `on_lost`.

    asked       the engine, the number of the attempt, and the nodes to ask for
    placement   receives the events
    post        posts an event
    """

    def __init__(
        self, asked: AskForPlace, order: EngineOrder, placement: Placement, post: Post
    ) -> None:
        self._asked, self._order, self._placement, self._post = asked, order, placement, post
        self._released = threading.Event()
        self._actor: Any = None
        self._thread = threading.Thread(target=self._run, name=asked.engine, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """End the attempt soon: kill its engine, and return its resources to Ray."""
        self._released.set()

    def drain(self) -> None:
        """Let the engine finish its open requests. Its exit is posted as a loss."""
        if self._actor is None:
            self.release()  # it has a place, but no process yet
            self._lost(EngineLoss("the engine was not started yet", 0))
        else:
            self._actor.drain.remote()

    @property
    def is_alive(self) -> bool:
        """Whether the attempt may still occupy resources of the Ray cluster."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # ---- the thread

    def _run(self) -> None:
        try:
            group = placement_group(
                [dict(self._order.need)],
                strategy="STRICT_PACK",
                bundle_label_selector=[selector(self._asked.wish)],
            )
            try:
                self._run_in(group)
            finally:
                remove_placement_group(group)  # kills the actor in it
        except _ReleasedError:
            return
        except Exception as error:
            self._lost(self._loss_from(error))

    def _run_in(self, group: PlacementGroup) -> None:
        while not group.wait(PLACE_POLL_S):
            self._check_released()
        node = placement_group_table(group)["bundles_to_node_id"][0]
        self._post(partial(self._placement.on_nodes, living_nodes(), free_resources()))
        self._send(self._placement.on_placed, node)  # the node may have joined just now
        self._actor = actor = new_actor(group, self._order.need)
        order = self._order
        address = self._result(actor.start.remote(order.arguments, order.key, order.environment))
        end = actor.wait.remote()
        client = self._connect(address, end)
        if client is None:
            return
        with client:
            self._send(self._placement.on_ready, address)
            self._watch(client, end)

    def _connect(self, address: str, end: Any) -> Client | None:
        """Wait until the engine is ready. Return None if it ended before that."""
        while not self._has_ended(end, 0):
            try:
                return Client(
                    address, name="launcher", wait_s=CONNECT_S, cluster_key=self._order.key_path
                )
            except EngineNotReady:
                self._check_released()
        return None

    def _watch(self, client: Client, end: Any) -> None:
        """Wait until the engine is lost."""
        while not self._has_ended(end, CHECK_EVERY_S):
            self._check_released()
            try:
                client.get_status(0)
            except EngineError as error:
                if not self._has_ended(end, REPORT_S):
                    cause = f"{self._asked.engine} is lost: {error}"
                    self._lost(EngineLoss(cause, is_node_suspect=True))
                return

    def _has_ended(self, end: Any, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the exit of the engine, and post it. Raises RayError if the
        actor is lost."""
        if not ray.wait([end], timeout=timeout_s)[0]:
            return False
        code, cause = ray.get(end)
        self._lost(EngineLoss(cause.replace("the engine", self._asked.engine, 1), code))
        return True

    def _loss_from(self, error: Exception) -> EngineLoss:
        engine = self._asked.engine
        if not isinstance(error, RayError):
            return EngineLoss(f"{engine} is lost: {type(error).__name__}: {first_line(error)}")
        failed_to_start = isinstance(error, RayActorError) and error.actor_init_failed
        if isinstance(error, RayTaskError) or failed_to_start:
            cause = last_error_line(str(error).splitlines())
            return EngineLoss(f"{engine} cannot be started: {cause}", ExitCode.FAILED)
        # Only a living node reports that an actor has died.
        return EngineLoss(
            f"{engine} is lost with its actor: {first_line(error)}",
            is_node_suspect=not isinstance(error, ActorDiedError),
        )

    def _result(self, reference: Any) -> Any:
        while not ray.wait([reference], timeout=PLACE_POLL_S)[0]:
            self._check_released()
        return ray.get(reference)

    def _check_released(self) -> None:
        if self._released.is_set():
            raise _ReleasedError

    def _lost(self, loss: EngineLoss) -> None:
        self._send(self._placement.on_lost, loss)

    def _send(self, event: Callable[..., list[PlacementAction]], *arguments: Any) -> None:
        self._post(partial(event, self._asked.engine, self._asked.attempt, *arguments))


def selector(wish: PlaceWish) -> dict[str, str]:
    """Return the labels of the nodes that `wish` allows, as Ray spells them."""
    if wish.target:
        return {NODE_ID: f"in({wish.target})"}
    return {NODE_ID: f"!in({','.join(sorted(wish.avoided))})"} if wish.avoided else {}


def new_actor(group: PlacementGroup, need: Resources) -> Any:
    """Return a new actor that has the resources `need` of the placement group."""
    return (
        ray.remote(EngineRunner)
        .options(
            num_cpus=need.get(CPU, 0),
            num_gpus=need.get(GPU, 0),
            max_concurrency=CONCURRENT_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0
            ),
        )
        .remote()
    )
