"""The phases of a model that a server loads and unloads, and their transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from protocol.machine import Machine
from protocol.tools.control import LoadState


class ModelPhase(Enum):
    UNLOADED = auto()  # has no process
    FAILED = auto()  # has no process, because the last one failed
    WAITING = auto()  # has no process; is in the queue
    LOADING = auto()  # its engines start; occupies memory
    READY = auto()  # serves requests; occupies memory
    YIELDING = auto()  # accepts no new requests, and finishes those that are open; occupies memory
    DRAINING = auto()  # its engines were signalled to stop; occupies memory


class ModelEvent(Enum):
    REQUEST = auto()  # somebody needs the model
    CANCEL = auto()  # nobody needs the model any more
    ADMIT = auto()  # there is room for the model
    READY = auto()  # an engine of the model is ready
    LOST = auto()  # no engine of the model is ready any more, and one is restarted
    YIELD = auto()  # the model makes room
    REVIVE = auto()  # the room is not needed any more
    CONFIRMED = auto()  # no gateway has open requests, nor will give new ones to the model
    EXITED = auto()  # no engine of the model is left
    FAILED = auto()  # no engine of the model is left, because the last one failed


MODEL_MACHINE = Machine(
    "model",
    starts=(ModelPhase.UNLOADED, ModelPhase.LOADING),
    rows={
        (ModelPhase.UNLOADED, ModelEvent.REQUEST): ModelPhase.WAITING,
        (ModelPhase.FAILED, ModelEvent.REQUEST): ModelPhase.WAITING,
        (ModelPhase.WAITING, ModelEvent.ADMIT): ModelPhase.LOADING,
        (ModelPhase.WAITING, ModelEvent.CANCEL): ModelPhase.UNLOADED,
        (ModelPhase.LOADING, ModelEvent.READY): ModelPhase.READY,
        (ModelPhase.LOADING, ModelEvent.YIELD): ModelPhase.YIELDING,
        (ModelPhase.LOADING, ModelEvent.EXITED): ModelPhase.UNLOADED,
        (ModelPhase.LOADING, ModelEvent.FAILED): ModelPhase.FAILED,
        (ModelPhase.READY, ModelEvent.LOST): ModelPhase.LOADING,
        (ModelPhase.READY, ModelEvent.YIELD): ModelPhase.YIELDING,
        (ModelPhase.READY, ModelEvent.EXITED): ModelPhase.UNLOADED,
        (ModelPhase.READY, ModelEvent.FAILED): ModelPhase.FAILED,
        (ModelPhase.YIELDING, ModelEvent.REVIVE): ModelPhase.READY,
        (ModelPhase.YIELDING, ModelEvent.LOST): ModelPhase.DRAINING,
        (ModelPhase.YIELDING, ModelEvent.CONFIRMED): ModelPhase.DRAINING,
        (ModelPhase.YIELDING, ModelEvent.EXITED): ModelPhase.UNLOADED,
        (ModelPhase.YIELDING, ModelEvent.FAILED): ModelPhase.UNLOADED,
        (ModelPhase.DRAINING, ModelEvent.EXITED): ModelPhase.UNLOADED,
        (ModelPhase.DRAINING, ModelEvent.FAILED): ModelPhase.UNLOADED,
    },
    ignores={
        ModelPhase.WAITING: {ModelEvent.REQUEST},
        # Another engine of the model may become ready, or be lost before any is ready.
        ModelPhase.LOADING: {ModelEvent.REQUEST, ModelEvent.LOST},
        ModelPhase.READY: {ModelEvent.REQUEST, ModelEvent.READY},
        ModelPhase.YIELDING: {ModelEvent.READY},
        ModelPhase.DRAINING: {ModelEvent.READY, ModelEvent.LOST},
    },
)

REPORTED_STATE: Mapping[ModelPhase, LoadState] = {
    ModelPhase.UNLOADED: "unloaded",
    ModelPhase.FAILED: "failed",
    ModelPhase.WAITING: "waiting",
    ModelPhase.LOADING: "loading",
    ModelPhase.READY: "ready",
    ModelPhase.YIELDING: "stopping",
    ModelPhase.DRAINING: "stopping",
}
LEAVING = {ModelPhase.YIELDING, ModelPhase.DRAINING}
NOT_LOADED = {ModelPhase.UNLOADED, ModelPhase.FAILED}
"""Phases in which nobody needs a model, and none of its processes runs."""
LOADED = {ModelPhase.LOADING, ModelPhase.READY, *LEAVING}
"""Phases in which a model occupies memory."""
