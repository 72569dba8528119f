"""Messages between workers: how D, which continues a prompt, reads K/V that P has computed.

```
 D: KVOpen ─────▶ P      names the lease and the first block, and describes D's cache
 D ◀───── KVOpened       lists P's blocks and the ways to read them
        the bytes        read from P's memory (shm, nixl), or requested: KVRead ─▶ ◀─ KVChunk
 D: KVDone ─────▶ P      all has been read, or D gives up
 D ◀─────── KVLive       the lease was live all the time: the bytes read are valid
```
If P answers KVExpired, the lease is over and the bytes read may be anything. Only KVLive makes a
transfer valid, however the bytes were moved.

D sends requests, and P answers each with one message. P stores nothing about D but its name. Each
transfer has its own socket, with the frames of wire.py.

Legend: B blocks.
"""

from __future__ import annotations

import msgspec

from protocol.arrays import Int32, UInt8
from protocol.messages import Message

READER_BYTES = 16
"""Random bytes in a transfer's name, which D draws."""
MAX_CHUNK_BYTES = 4 << 20
WINDOW = 4
"""Most chunks that D requests before they arrive. P never queues more."""


# ---- D -> P


class KVOpen(Message, frozen=True, kw_only=True):
    """D -> P. Open blocks [first, first + count) of the lease, in its order, for `reader`. `layout`
    and `told` describe D's cache, as in KVEndpoint.
    """

    lease: bytes
    reader: bytes
    layout: bytes
    told: str
    first: int
    count: int


class KVRead(Message, frozen=True, kw_only=True):
    """D -> P, with the mover "zmq". Send this chunk of the opened blocks. Chunks are numbered from
    0, in the order of `worker.kv.movers.zmq`.
    """

    lease: bytes
    reader: bytes
    chunk: int


class KVDone(Message, frozen=True, kw_only=True):
    """D -> P. `reader` is finished: it has read everything, or it gives up."""

    lease: bytes
    reader: bytes
    is_read: bool  #: False: it gives up, and expects no answer


# ---- P -> D


class ShmOffer(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="shm", omit_defaults=True
):
    """P's cache can be mapped by processes of the same user on the same host.

    boot            id of the host's kernel boot; the other fields are valid only within the same
                    boot
    path            path that opens the memory; `device` and `inode` must match the file opened
    num_bytes       size of the memory: the rows of the cache, each of `num_blocks` blocks
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
    """P sends the chunks requested by KVRead, each of at most `chunk_bytes`."""

    chunk_bytes: int


class NixlOffer(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nixl", omit_defaults=True
):
    """P's cache is registered with NIXL.

    agent       metadata of P's NIXL agent
    address     address of the cache in P's memory
    device, memory   device number and memory type, in NIXL's terms
    num_blocks  blocks in each row
    """

    agent: bytes
    address: int
    device: int
    memory: str
    num_blocks: int


Offer = ShmOffer | ZmqOffer | NixlOffer


class KVOpened(Message, frozen=True, kw_only=True):
    """P -> D. The requested blocks [B] of P, and the ways to read them."""

    blocks: Int32
    offers: list[Offer]


class KVChunk(Message, frozen=True, kw_only=True):
    """P -> D. A chunk, and its crc32 (zlib)."""

    chunk: int
    crc32: int
    data: UInt8


class KVLive(Message, frozen=True, kw_only=True):
    """P -> D, answering KVDone. The lease was live all the time: the bytes read are valid."""


class KVExpired(Message, frozen=True, kw_only=True):
    """P -> D, answering any message. The lease is over, or unknown."""


class KVUnlike(Message, frozen=True, kw_only=True):
    """P -> D, answering KVOpen. P's cache cannot be read by D; `reason` says why."""

    reason: str


FromReader = KVOpen | KVRead | KVDone
FromExporter = KVOpened | KVChunk | KVLive | KVExpired | KVUnlike
