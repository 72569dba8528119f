"""Which of the ways that a peer offers is taken, by what this worker was told to use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from protocol.kv_peers import NixlOffer, Offer, ShmOffer, ZmqOffer
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
"""WorkerConfig.kv_mover -> what is looked for among the offers, best first."""


class Unoffered(Exception):
    """The peer offers no way that we may take."""


class Ways:
    """agent: of NIXL, where it may be used."""

    def __init__(self, name: Name, blocks: CacheBlocks, agent: Agent | None) -> None:
        self._name = name
        self._blocks = blocks
        self._agent = agent

    def mover(
        self, ids: Ids, theirs: Ids, offers: Sequence[Offer], ask: Callable[[int], None]
    ) -> Mover:
        """Out of blocks `theirs` of the peer into our `ids`. Raises Unoffered, Damaged, and Lost
        where there is no other way left."""
        wanted = ORDER[self._name]
        found = [offer for kind in wanted for offer in offers if isinstance(offer, kind)]
        if not found:
            offered = ", ".join(map(_name, offers)) or "nothing"
            raise Unoffered(f"kv_mover is {self._name} here; the peer offers {offered}")
        for offer in found[:-1]:
            try:
                return self._by(offer, ids, theirs, ask)
            except TransferLost as error:
                log.info("not by %s: %s", _name(offer), error)
        return self._by(found[-1], ids, theirs, ask)

    def _by(self, offer: Offer, ids: Ids, theirs: Ids, ask: Callable[[int], None]) -> Mover:
        match offer:
            case ShmOffer():
                return ShmMover(self._blocks, ids, theirs, offer)
            case ZmqOffer(chunk_bytes=chunk_bytes):
                return ZmqMover(self._blocks, ids, chunk_bytes, ask)
            case NixlOffer():
                assert self._agent is not None, "kv_mover is nixl"
                return NixlMover(self._agent, ids, theirs, offer)


def _name(offer: Offer) -> str:
    return str(offer.__struct_config__.tag)
