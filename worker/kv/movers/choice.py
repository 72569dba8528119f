"""Chooses a mover among those that the peer offers and this worker's configuration allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from protocol.worker.kv_peers import NixlOffer, Offer, ShmOffer, ZmqOffer
from worker.kv.blocks import CacheBlocks
from worker.kv.movers.base import Mover, TransferLost
from worker.kv.movers.nixl import Agent, NixlMover
from worker.kv.movers.shm import ShmMover
from worker.kv.movers.zmq import ZmqMover
from worker.kv.transfer.exports import Ids

log = logging.getLogger(__name__)

Name = Literal["auto", "shm", "zmq", "nixl"]
ORDER: dict[Name, tuple[type[Offer], ...]] = {
    "auto": (ShmOffer, ZmqOffer),
    "shm": (ShmOffer,),
    "zmq": (ZmqOffer,),
    "nixl": (NixlOffer,),
}
"""WorkerConfig.kv_mover -> the offers that it accepts, best first."""


class NoCommonMover(Exception):
    """Raised if the peer offers no mover that this worker's configuration allows."""


class MoverFactory:
    """Creates a mover for each transfer into `blocks`. `agent` is the NIXL agent; it is needed only
    if kv_mover is nixl."""

    def __init__(self, name: Name, blocks: CacheBlocks, agent: Agent | None) -> None:
        self.blocks = blocks
        self._name = name
        self._agent = agent

    def create(
        self, ids: Ids, theirs: Ids, offers: Sequence[Offer], request: Callable[[int], None]
    ) -> Mover:
        """Return a mover that copies the blocks `theirs` of the peer to our blocks `ids`.
        `request(n)` must request chunk n from the peer.

        If an offer fails with TransferLost, the next accepted offer is tried. Raises NoCommonMover,
        DamagedTransfer, or the TransferLost of the last offer.
        """
        wanted = ORDER[self._name]
        found = [offer for kind in wanted for offer in offers if isinstance(offer, kind)]
        if not found:
            offered = ", ".join(map(_name, offers)) or "nothing"
            raise NoCommonMover(f"kv_mover is {self._name} here; the peer offers {offered}")
        for offer in found[:-1]:
            try:
                return self._from_offer(offer, ids, theirs, request)
            except TransferLost as error:
                log.info("cannot use the mover %s: %s", _name(offer), error)
        return self._from_offer(found[-1], ids, theirs, request)

    def _from_offer(
        self, offer: Offer, ids: Ids, theirs: Ids, request: Callable[[int], None]
    ) -> Mover:
        match offer:
            case ShmOffer():
                return ShmMover(self.blocks, ids, theirs, offer)
            case ZmqOffer(chunk_bytes=chunk_bytes):
                return ZmqMover(self.blocks, ids, chunk_bytes, request)
            case NixlOffer():
                assert self._agent is not None, "kv_mover is nixl"
                return NixlMover(self._agent, ids, theirs, offer)


def _name(offer: Offer) -> str:
    return str(offer.__struct_config__.tag)
