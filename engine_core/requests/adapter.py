"""A LoRA adapter of the engine: its row in the worker's table, and its state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from protocol.engine.adapters import AdapterInfo
from protocol.machine import Machine


class AdapterState(Enum):
    LOADING = auto()  # owns a row, which the worker is filling; not listed
    READY = auto()  # listed; requests can use it
    LEAVING = auto()  # not listed; open requests still use it
    UNLOADING = auto()  # no request uses it; the worker is freeing its row
    GONE = auto()  # final; owns nothing


class AdapterEvent(Enum):
    LOADED = auto()
    FAILED = auto()
    UNLOAD = auto()
    UNUSED = auto()
    FREED = auto()


ADAPTER_MACHINE = Machine(
    "adapter",
    starts=(AdapterState.LOADING,),
    rows={
        (AdapterState.LOADING, AdapterEvent.LOADED): AdapterState.READY,
        (AdapterState.LOADING, AdapterEvent.FAILED): AdapterState.GONE,
        (AdapterState.READY, AdapterEvent.UNLOAD): AdapterState.LEAVING,
        (AdapterState.LEAVING, AdapterEvent.UNUSED): AdapterState.UNLOADING,
        (AdapterState.UNLOADING, AdapterEvent.FREED): AdapterState.GONE,
    },
)


@dataclass(slots=True, eq=False)
class EngineAdapter:
    """An adapter, from the start of its loading until its row is free."""

    name: str
    path: str
    row: int
    #: Generation of the row while the adapter owns it.
    generation: int
    #: Only `move` changes it.
    state: AdapterState = AdapterState.LOADING
    #: Hex digest of its content; "" until it is loaded.
    digest: str = ""
    rank: int = 0
    #: Number of requests that were accepted with it.
    num_requests: int = 0
    #: The client that waits for the adapter to be loaded or unloaded, and its request's number.
    client: bytes = b""
    request: int = -1

    @property
    def info(self) -> AdapterInfo:
        return AdapterInfo(name=self.name, digest=self.digest, rank=self.rank, path=self.path)

    def move(self, event: AdapterEvent) -> None:
        """Change the state. Raises IllegalMove and changes nothing if it does not admit `event`."""
        self.state = ADAPTER_MACHINE.move(self.state, event, subject=self.name)
