"""NIXL mover: reads the peer's memory by RDMA, or by another transport that NIXL's UCX backend
chooses.

NIXL is optional (`tidegate[nixl]`). Its own progress thread is off, because that thread never
sleeps. Instead, the reader drives a transfer by polling its state. If the hardware cannot read by
itself, the peer must also call `Agent.make_progress` while its memory is read.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from protocol.process.installation import install_command
from protocol.worker.kv_peers import KVChunk, NixlOffer
from worker.kv.movers.base import DamagedTransfer, PollHint, TransferLost
from worker.kv.transfer.exports import Ids

LIBRARY = "nixl_cu12"
SLICE_BYTES = 4 << 20
"""Bytes read by one NIXL request. Other transfers run between two requests."""


class NoNixl(Exception):
    """Raised if the NIXL library is not installed, or does not start."""


class Agent:
    """A NIXL agent of this worker, for one thread and one cache, rows uint8 [R, B, P]. The
    constructor raises NoNixl if the library is not installed, or does not start."""

    def __init__(self, rows: Tensor) -> None:
        nixl = _library()
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        # NIXL's errors have no common base class, so Exception is caught here and below.
        try:
            self._agent: Any = nixl.nixl_agent(f"tidegate-{os.urandom(8).hex()}", config)
        except Exception as error:
            raise NoNixl(f"kv_mover is nixl, but NIXL does not start: {error}") from error
        self._memory = "DRAM" if rows.device.type == "cpu" else "VRAM"
        self._device = rows.device.index or 0
        self._address = rows.data_ptr()
        self.num_rows, self._num_blocks, self.piece_bytes = rows.shape
        whole = np.array([[self._address, rows.nbytes, self._device]], np.uint64)
        self._agent.register_memory(whole, self._memory)
        self._peers: dict[bytes, str] = {}  # agent metadata -> agent name

    def offer(self) -> NixlOffer:
        return NixlOffer(
            agent=self._agent.get_agent_metadata(),
            address=self._address,
            device=self._device,
            memory=self._memory,
            num_blocks=self._num_blocks,
        )

    def make_progress(self) -> None:
        """Do this worker's part when other workers read its memory."""
        self._agent.get_new_notifs()

    def read(self, offer: NixlOffer, ids: Ids, theirs: Ids) -> Any:
        """Start to read the blocks `theirs` of the peer into our blocks `ids`. Return a handle of
        the read. Raises TransferLost if NIXL cannot start it."""
        try:
            if offer.agent not in self._peers:
                name = self._agent.add_remote_agent(offer.agent)
                self._peers[offer.agent] = name.decode() if isinstance(name, bytes) else name
            handle = self._agent.initialize_xfer(
                "READ",
                self._pieces(self._address, self._num_blocks, self._device, ids, self._memory),
                self._pieces(offer.address, offer.num_blocks, offer.device, theirs, offer.memory),
                self._peers[offer.agent],
            )
        except Exception as error:
            self._forget(offer)
            raise TransferLost(f"nixl: {error}") from error
        try:
            self._agent.transfer(handle)
        except Exception as error:
            self._forget(offer)
            self.release(handle)
            raise TransferLost(f"nixl: {error}") from error
        return handle

    def is_done(self, offer: NixlOffer, handle: Any) -> bool:
        """Return whether the read is done. Raises TransferLost if it has failed."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            self._forget(offer)
            raise TransferLost(f"nixl: {error}") from error
        if state == "ERR":
            self._forget(offer)
            raise TransferLost("nixl: the transfer failed")
        return bool(state == "DONE")

    def release(self, handle: Any) -> bool:
        """Release the handle of a read. Return False if the read is still active; then call
        again."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:  # any error means that it is still active
            return False
        return True

    def _forget(self, offer: NixlOffer) -> None:
        name = self._peers.pop(offer.agent, None)
        if name is not None:
            self._agent.remove_remote_agent(name)

    def _pieces(self, address: int, num_blocks: int, device: int, ids: Ids, memory: str) -> Any:
        """Return the descriptors of these blocks' pieces, row after row."""
        rows = np.arange(self.num_rows)[:, None] * num_blocks
        starts = (address + (rows + ids) * self.piece_bytes).ravel()
        sizes, devices = np.full_like(starts, self.piece_bytes), np.full_like(starts, device)
        table = np.stack([starts, sizes, devices], axis=1).astype(np.uint64)
        return self._agent.get_xfer_descs(table, memory)


class NixlMover:
    """Copies the blocks `theirs` of the peer's cache to our blocks `ids`, some at a time. The
    constructor raises DamagedTransfer if a block is outside the offered cache."""

    name = "nixl"

    def __init__(self, agent: Agent, ids: Ids, theirs: Ids, offer: NixlOffer) -> None:
        if theirs.min() < 0 or theirs.max() >= offer.num_blocks:
            raise DamagedTransfer(f"a block is outside the {offer.num_blocks} of the peer's cache")
        self._agent = agent
        self._ids, self._theirs, self._offer = ids, theirs, offer
        self._at_once = max(1, SLICE_BYTES // (agent.num_rows * agent.piece_bytes))
        self._num_read = 0
        self._handle: Any = None

    def advance(self) -> PollHint:
        if self._handle is None:
            part = slice(self._num_read, self._num_read + self._at_once)
            self._handle = self._agent.read(self._offer, self._ids[part], self._theirs[part])
        if not self._agent.is_done(self._offer, self._handle):
            return PollHint.SOON
        self._agent.release(self._handle)
        self._handle = None
        self._num_read += self._at_once
        return PollHint.NOW if self._num_read < len(self._ids) else PollHint.DONE

    def receive(self, chunk: KVChunk) -> None:
        raise DamagedTransfer(f"unexpected chunk {chunk.chunk}")

    def stop(self) -> bool:
        if self._handle is not None and self._agent.release(self._handle):
            self._handle = None
        return self._handle is None


def _library() -> ModuleType:
    try:
        return importlib.import_module(LIBRARY)
    except ImportError as error:
        raise NoNixl(
            f"kv_mover is nixl, but the library nixl-cu12 cannot be imported ({error}): "
            f"{install_command('nixl')}, or serve with --kv-mover auto"
        ) from None
