"""The states of one placed engine, and their transitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from protocol.machine import Machine
from tools.processes.restart_policy import RestartPolicy


class PlacementState(Enum):
    WAITING = auto()  # has asked Ray for a place; owns none yet
    STARTING = auto()  # has a place, where its engine starts; limited by `deadline`
    READY = auto()  # its engine serves, and is in the list of engines
    LOST = auto()  # owns nothing; asks for a place again at `deadline`
    STOPPING = auto()  # has a place, where its engine drains
    STOPPED = auto()  # owns nothing; final


class PlacementEvent(Enum):
    PLACED = auto()  # Ray has reserved its resources on a node
    READY = auto()  # its engine accepts requests
    LOST = auto()  # its engine has ended, or cannot be reached
    RETRY = auto()  # the time of the next attempt has come
    GIVE_UP = auto()  # another attempt would not help
    STOP = auto()  # the server stops


PLACEMENT_MACHINE = Machine(
    "placement",
    starts=(PlacementState.WAITING,),
    rows={
        (PlacementState.WAITING, PlacementEvent.PLACED): PlacementState.STARTING,
        (PlacementState.WAITING, PlacementEvent.LOST): PlacementState.LOST,
        (PlacementState.WAITING, PlacementEvent.STOP): PlacementState.STOPPED,
        (PlacementState.STARTING, PlacementEvent.READY): PlacementState.READY,
        (PlacementState.STARTING, PlacementEvent.LOST): PlacementState.LOST,
        (PlacementState.STARTING, PlacementEvent.STOP): PlacementState.STOPPING,
        (PlacementState.READY, PlacementEvent.LOST): PlacementState.LOST,
        (PlacementState.READY, PlacementEvent.STOP): PlacementState.STOPPING,
        (PlacementState.LOST, PlacementEvent.RETRY): PlacementState.WAITING,
        (PlacementState.LOST, PlacementEvent.GIVE_UP): PlacementState.STOPPED,
        (PlacementState.LOST, PlacementEvent.STOP): PlacementState.STOPPED,
        (PlacementState.STOPPING, PlacementEvent.LOST): PlacementState.STOPPED,
    },
)

PLACED = {PlacementState.STARTING, PlacementState.READY, PlacementState.STOPPING}
"""States with a place."""


@dataclass(frozen=True, slots=True)
class PlaceWish:
    """The nodes on which Ray may reserve the resources of an engine, by id."""

    #: The only node; "": any node but those in `avoided`.
    target: str = ""
    avoided: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class PlacedEngine:
    """One of the engines that the launcher keeps running."""

    name: str
    #: Restarts after failures of the engine itself.
    restarts: RestartPolicy
    #: Since when it waits for a place.
    since: float
    state: PlacementState = PlacementState.WAITING
    #: Number of the present attempt to run the engine. Reports of earlier attempts are ignored.
    attempt: int = 0
    #: What Ray was asked for in the present attempt; None: nothing yet.
    wish: PlaceWish | None = None
    #: Id of the node that it has a place on; "": none.
    node: str = ""
    #: ZeroMQ address; "" before it is ready.
    address: str = ""
    #: Time of the next attempt (LOST), or time by which it must be ready (STARTING).
    deadline: float | None = None
    #: Whether it was logged that it waits for a place.
    is_hinted: bool = field(default=False, compare=False)

    def change(self, event: PlacementEvent, deadline: float | None = None) -> None:
        """Change the state. Raises IllegalMove and changes nothing if it does not admit `event`."""
        self.state = PLACEMENT_MACHINE.move(self.state, event, subject=self.name)
        self.deadline = deadline
        if self.state not in PLACED:
            self.node = ""
        if self.state is not PlacementState.READY:
            self.address = ""
