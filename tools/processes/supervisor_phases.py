"""The phases of a server, such as starting, serving and draining, and their transitions."""

from __future__ import annotations

from enum import Enum, auto

from protocol.machine import Machine


class SupervisorPhase(Enum):
    STARTING = auto()  # children run; not ready yet; limited by start_timeout_s
    SERVING = auto()  # was ready; ends with a failure or a signal
    RESTARTING = auto()  # a child is being restarted, as in STARTING; the others serve
    FOLLOWING = auto()  # a child was drained from outside; the other children are draining
    DRAINING = auto()  # the children drain one after the other
    STOPPING = auto()  # all children were signalled to stop after a failure
    KILLING = auto()  # all children were killed
    ENDED = auto()  # no child is left


UNSTOPPED = {SupervisorPhase.STARTING, SupervisorPhase.SERVING, SupervisorPhase.RESTARTING}
"""Phases before any child has received a stop signal."""


class SupervisorEvent(Enum):
    READY = auto()  # the server is ready
    LOST = auto()  # a child exited and will be restarted
    FAILED = auto()  # a child exited and will not be restarted
    DRAINED = auto()  # a child exited after a drain from outside
    STOP_SIGNAL = auto()  # a stop signal arrived
    DEADLINE = auto()  # the phase's deadline has passed
    ALL_EXITED = auto()  # no child is left, and no restart is pending


REPEATED = {SupervisorEvent.READY, SupervisorEvent.FAILED, SupervisorEvent.STOP_SIGNAL}
"""Events that change nothing any more after the children were killed."""

SUPERVISOR_MACHINE = Machine(
    "supervisor",
    starts=(SupervisorPhase.STARTING,),
    rows={
        (SupervisorPhase.STARTING, SupervisorEvent.READY): SupervisorPhase.SERVING,
        (SupervisorPhase.STARTING, SupervisorEvent.FAILED): SupervisorPhase.STOPPING,
        (SupervisorPhase.STARTING, SupervisorEvent.DRAINED): SupervisorPhase.FOLLOWING,
        (SupervisorPhase.STARTING, SupervisorEvent.STOP_SIGNAL): SupervisorPhase.DRAINING,
        (SupervisorPhase.STARTING, SupervisorEvent.DEADLINE): SupervisorPhase.STOPPING,
        (SupervisorPhase.SERVING, SupervisorEvent.LOST): SupervisorPhase.RESTARTING,
        (SupervisorPhase.SERVING, SupervisorEvent.FAILED): SupervisorPhase.STOPPING,
        (SupervisorPhase.SERVING, SupervisorEvent.DRAINED): SupervisorPhase.FOLLOWING,
        (SupervisorPhase.SERVING, SupervisorEvent.STOP_SIGNAL): SupervisorPhase.DRAINING,
        (SupervisorPhase.RESTARTING, SupervisorEvent.READY): SupervisorPhase.SERVING,
        (SupervisorPhase.RESTARTING, SupervisorEvent.LOST): SupervisorPhase.RESTARTING,
        (SupervisorPhase.RESTARTING, SupervisorEvent.FAILED): SupervisorPhase.STOPPING,
        (SupervisorPhase.RESTARTING, SupervisorEvent.DRAINED): SupervisorPhase.FOLLOWING,
        (SupervisorPhase.RESTARTING, SupervisorEvent.STOP_SIGNAL): SupervisorPhase.DRAINING,
        (SupervisorPhase.RESTARTING, SupervisorEvent.DEADLINE): SupervisorPhase.STOPPING,
        (SupervisorPhase.FOLLOWING, SupervisorEvent.STOP_SIGNAL): SupervisorPhase.DRAINING,
        (SupervisorPhase.FOLLOWING, SupervisorEvent.DEADLINE): SupervisorPhase.KILLING,
        (SupervisorPhase.FOLLOWING, SupervisorEvent.ALL_EXITED): SupervisorPhase.ENDED,
        (SupervisorPhase.DRAINING, SupervisorEvent.STOP_SIGNAL): SupervisorPhase.KILLING,
        (SupervisorPhase.DRAINING, SupervisorEvent.DEADLINE): SupervisorPhase.KILLING,
        (SupervisorPhase.DRAINING, SupervisorEvent.ALL_EXITED): SupervisorPhase.ENDED,
        (SupervisorPhase.STOPPING, SupervisorEvent.STOP_SIGNAL): SupervisorPhase.KILLING,
        (SupervisorPhase.STOPPING, SupervisorEvent.DEADLINE): SupervisorPhase.KILLING,
        (SupervisorPhase.STOPPING, SupervisorEvent.ALL_EXITED): SupervisorPhase.ENDED,
        (SupervisorPhase.KILLING, SupervisorEvent.ALL_EXITED): SupervisorPhase.ENDED,
    },
    ignores={
        # The last child of an optional group may exit while no other child runs.
        SupervisorPhase.STARTING: {SupervisorEvent.ALL_EXITED},
        # A replica was started again, which ends no phase.
        SupervisorPhase.SERVING: {SupervisorEvent.READY, SupervisorEvent.ALL_EXITED},
        SupervisorPhase.RESTARTING: {SupervisorEvent.ALL_EXITED},
        # The server stops already. A child may still become ready, and SIGQUIT may arrive.
        SupervisorPhase.FOLLOWING: {SupervisorEvent.READY, SupervisorEvent.FAILED},
        SupervisorPhase.DRAINING: {SupervisorEvent.READY, SupervisorEvent.FAILED},
        SupervisorPhase.STOPPING: {SupervisorEvent.READY, SupervisorEvent.FAILED},
        # A third Ctrl-C, for example.
        SupervisorPhase.KILLING: REPEATED,
        SupervisorPhase.ENDED: REPEATED,
    },
)
