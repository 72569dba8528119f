"""Worker <-> worker: how the one that goes on gets the K/V of the one that computed it.

```
 D: KVOpen ─────▶ P      which lease, from which block on, and what D's cache looks like
 D ◀───── KVOpened       which blocks of P these are, and by which ways they can be had
        the bytes        read from P's memory (shm, nixl), or asked for: KVRead ─▶ ◀─ KVChunk
 D: KVDone ─────▶ P      all has been read, or D gives up
 D ◀─────── KVLive       the lease was live all the time: what has been read is right
```
Wherever P answers KVExpired the lease is over, and what has been read may be anything. The bytes
go one of several ways, all else is the same for all of them: only KVLive makes a transfer good.

D asks, P answers each question with one message; P keeps nothing of a D but its name. They use the
frames of wire.py on a socket of their own per transfer.

Legend: B blocks.
"""

from __future__ import annotations

import msgspec

from protocol.arrays import Int32, UInt8
from protocol.messages import Message

READER_BYTES = 16
"""A transfer's name, drawn by D: so many random bytes."""
MAX_CHUNK_BYTES = 4 << 20
WINDOW = 4
"""D asks for at most so many chunks that have not arrived; more than these are never kept by P."""


# ---- D -> P


class KVOpen(Message, frozen=True, kw_only=True):
    """D -> P: I, `reader`, want blocks [first, first + count) of the lease, in its order. `layout`
    and `told` are of D's cache, as in KVEndpoint."""

    lease: bytes
    reader: bytes
    layout: bytes
    told: str
    first: int
    count: int


class KVRead(Message, frozen=True, kw_only=True):
    """D -> P, by the way "zmq": send me that chunk of what I opened. Chunks are numbered in the
    order of `worker.kv.transfer.cuts`, from 0."""

    lease: bytes
    reader: bytes
    chunk: int


class KVDone(Message, frozen=True, kw_only=True):
    """D -> P: `reader` will not come again. is_read: it has read all; else it has given up, and
    waits for no answer."""

    lease: bytes
    reader: bytes
    is_read: bool


# ---- P -> D


class ShmOffer(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="shm", omit_defaults=True
):
    """P's cache can be mapped by processes of the same user on the same host.

    boot            which start of which kernel: only there does the rest mean anything
    path            opens the memory, if `device` and `inode` are what is found behind it
    num_bytes       of the memory: the rows of the cache, each `num_blocks` blocks
    """

    boot: str
    path: str
    device: int
    inode: int
    num_bytes: int
    num_blocks: int


class ZmqOffer(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="zmq", omit_defaults=True
):
    """P sends what KVRead asks for, cut into chunks of at most so many bytes."""

    chunk_bytes: int


class NixlOffer(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nixl", omit_defaults=True
):
    """P's cache is registered with NIXL.

    agent      what NIXL's agent at P says of itself to others
    address    of the cache in P's memory;  device, memory: where that is, in NIXL's words
    num_blocks of each row
    """

    agent: bytes
    address: int
    device: int
    memory: str
    num_blocks: int


Offer = ShmOffer | ZmqOffer | NixlOffer


class KVOpened(Message, frozen=True, kw_only=True):
    """P -> D: blocks [B] of P are what was asked for; they can be had by any of these ways."""

    blocks: Int32
    offers: list[Offer]


class KVChunk(Message, frozen=True, kw_only=True):
    """P -> D: a chunk, and zlib's crc32 of it."""

    chunk: int
    crc32: int
    data: UInt8


class KVLive(Message, frozen=True, kw_only=True):
    """P -> D, to KVDone: nobody but the lease has had these blocks until now."""


class KVExpired(Message, frozen=True, kw_only=True):
    """P -> D, to anything: the lease is over, or was never heard of."""


class KVUnlike(Message, frozen=True, kw_only=True):
    """P -> D, to KVOpen: it cannot be, because `reason`."""

    reason: str


FromReader = KVOpen | KVRead | KVDone
FromExporter = KVOpened | KVChunk | KVLive | KVExpired | KVUnlike
