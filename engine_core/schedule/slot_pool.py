"""Slot pool: the worker's free slots, and the generation of each slot.

The generation of a slot is the number of times that it was allocated. A bind and its release carry
the same generation, so the worker detects a release that comes twice or too late.
"""

from __future__ import annotations

from engine_core.requests.request import Request
from protocol.worker.steps import SlotRelease


class SlotPool:
    """The slots of one worker. Each is either free or owned by one request."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        #: Generation of each slot.
        self._generations = [0] * num_slots
        #: Releases to send to the worker with the next plan.
        self._releases: list[SlotRelease] = []

    @property
    def free(self) -> list[int]:
        return list(self._free)

    def allocate(self, request: Request) -> None:
        """Give the request a free slot. The caller ensures that one is free."""
        slot = self._free.pop()
        self._generations[slot] += 1
        request.slot, request.slot_generation = slot, self._generations[slot]

    def release(self, request: Request, *, is_bound: bool) -> None:
        """Free the request's slot.

        If the worker has bound the slot, the next plan also releases it in the worker.
        """
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
        """Return the releases since the last call, to send with the next plan."""
        releases, self._releases = self._releases, []
        return releases
