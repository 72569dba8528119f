"""The start of the gateway processes of a port: whether each of them has been ready.

Any of the processes that share a port may accept a connection. So the server is ready only after
all of them have been.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

FREE, STARTING, READY = range(3)


class GatewayStart:
    """The states of `num_gateways` gateway processes (starting or ready), in memory that the
    master process shares with them."""

    def __init__(self, num_gateways: int) -> None:
        self.num_gateways = num_gateways
        #: The state of each place, then whether the start is over.
        self._memory = mmap.mmap(-1, num_gateways + 1)

    def take_place(self) -> GatewayPlace:
        """Return a free entry, for a process that the master is about to fork. Processes beyond
        `num_gateways` have no number, and the server is ready without them."""
        number = self._memory.find(bytes([FREE]), 0, self.num_gateways)
        place = GatewayPlace(self, None if number < 0 else number)
        place.set_state(STARTING)
        return place

    def set_state(self, number: int, state: int) -> None:
        self._memory[number] = state

    @property
    def is_over(self) -> bool:
        """Whether all processes have been ready. It stays true if one of them is replaced."""
        if self._num_ready == self.num_gateways:
            self._memory[self.num_gateways] = True
        return bool(self._memory[self.num_gateways])

    def trouble(self) -> str | None:
        """Return why the server is not ready although this process is; None if it is ready."""
        if self.is_over:
            return None
        return f"{self._num_ready} of {self.num_gateways} gateway processes are ready"

    @property
    def _num_ready(self) -> int:
        return self._memory[: self.num_gateways].count(READY)


@dataclass(frozen=True, slots=True)
class GatewayPlace:
    """The entry of one gateway process in `GatewayStart`. `number` is None if it has no entry."""

    start: GatewayStart
    number: int | None

    def set_state(self, state: int) -> None:
        """Set the state of the process: STARTING, READY, or FREE after it has ended."""
        if self.number is not None:
            self.start.set_state(self.number, state)
