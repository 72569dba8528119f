"""The states of one child process, and their transitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from protocol.machine import Machine
from tools.processes.restart_policy import RestartPolicy


class ChildState(Enum):
    DOWN = auto()  # has no process, and none starts by itself
    STARTING = auto()  # its process runs, but is not ready yet
    READY = auto()  # its process serves requests
    WAITING = auto()  # has no process; the next one starts at `deadline`
    RETIRING = auto()  # its process drains while the server continues; limited by `deadline`


class ChildEvent(Enum):
    START = auto()  # a process is started
    READY = auto()  # the process is ready
    LOST = auto()  # the process exited and will be restarted
    EXITED = auto()  # the process exited
    RETIRE = auto()  # the child is not needed now: its process drains, or its restart is cancelled


CHILD_MACHINE = Machine(
    "child",
    starts=(ChildState.STARTING, ChildState.DOWN),
    rows={
        (ChildState.DOWN, ChildEvent.START): ChildState.STARTING,
        (ChildState.STARTING, ChildEvent.READY): ChildState.READY,
        (ChildState.STARTING, ChildEvent.LOST): ChildState.WAITING,
        (ChildState.STARTING, ChildEvent.EXITED): ChildState.DOWN,
        (ChildState.STARTING, ChildEvent.RETIRE): ChildState.RETIRING,
        (ChildState.READY, ChildEvent.LOST): ChildState.WAITING,
        (ChildState.READY, ChildEvent.EXITED): ChildState.DOWN,
        (ChildState.READY, ChildEvent.RETIRE): ChildState.RETIRING,
        (ChildState.WAITING, ChildEvent.START): ChildState.STARTING,
        (ChildState.WAITING, ChildEvent.RETIRE): ChildState.DOWN,
        (ChildState.RETIRING, ChildEvent.EXITED): ChildState.DOWN,
    },
)

ALIVE = {ChildState.STARTING, ChildState.READY, ChildState.RETIRING}
"""States with a process."""


@dataclass(slots=True, eq=False)
class ChildRecord:
    """One child of a supervisor."""

    name: str
    #: Name of its group. The children of a group replace each other: they are replicas.
    group: str
    #: Restarts of this child while other children of its group serve.
    restarts: RestartPolicy
    state: ChildState = ChildState.STARTING
    #: Time of its restart (WAITING), or time at which it is killed (STARTING, RETIRING). None: the
    #: state has no limit of its own.
    deadline: float | None = None
    #: Whether a RETIRING child will be started again afterwards.
    comes_back: bool = False
    #: Why the supervisor killed its process; "" if it did not.
    killed_because: str = ""
    #: Why its last process failed; "" after a successful start.
    failure: str = field(default="", compare=False)

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE

    @property
    def is_promised(self) -> bool:
        """Whether the child serves, or will serve: it is starting, or will be restarted."""
        if self.state is ChildState.RETIRING:
            return self.comes_back
        return self.state is not ChildState.DOWN

    def change(self, event: ChildEvent, deadline: float | None = None) -> None:
        """Change the state. Raises IllegalMove and changes nothing if it does not admit `event`."""
        self.state = CHILD_MACHINE.move(self.state, event, subject=self.name)
        self.deadline = deadline
