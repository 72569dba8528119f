"""Slot pool: the worker's slots that are free, and the generation of each.

The engine alone counts generations. A bind and the release that ends it carry the same one, so the
worker notices a release that comes twice or too late.
"""

from __future__ import annotations

from engine_core.request import Request
from protocol.steps import SlotRelease


class SlotPool:
    """Every slot is either free or owned by one request."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        #: Number of times that each slot was allocated.
        self._generations = [0] * num_slots
        #: To be sent to the worker with the next plan.
        self._releases: list[SlotRelease] = []

    @property
    def free(self) -> list[int]:
        return list(self._free)

    def allocate(self, request: Request) -> None:
        """Give the request a free slot. There must be one."""
        slot = self._free.pop()
        self._generations[slot] += 1
        request.slot, request.slot_generation = slot, self._generations[slot]

    def release(self, request: Request, *, is_bound: bool) -> None:
        """Take the request's slot back. If it was bound, the worker has to release it, too."""
        slot, generation = request.slot, request.slot_generation
        assert slot is not None, f"request {request.number} owns no slot"
        assert generation == self._generations[slot], (
            f"request {request.number} does not own slot {slot} any more"
        )
        if is_bound:
            self._releases.append(SlotRelease(slot=slot, generation=generation))
        self._free.append(slot)
        request.slot = None

    def drain_releases(self) -> list[SlotRelease]:
        """Return the releases to send with the next plan."""
        releases, self._releases = self._releases, []
        return releases
