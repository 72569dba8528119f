"""Messages between workers: how D, which continues from a prompt, reads K/V that P has computed.

```
 D: KVOpen ─────▶ P      names the lease and the first block, and describes D's cache
 D ◀───── KVOpened       lists P's blocks and the ways to read them
        the bytes        read from P's memory (shm, nixl), or requested: KVRead ─▶ ◀─ KVChunk
 D: KVDone ─────▶ P      all has been read, or D gives up
 D ◀─────── KVLive       the lease did not end during the transfer: the bytes read are valid
```
If the model has a recurrent state, D reads all blocks up to the last one, and then the state after
it, in the same way: a checkpoint has a number among P's checkpoints, as a block has among its
blocks, and their memory is offered apart.

If P answers KVExpired, the lease is over and the bytes read may be wrong. However the bytes were
moved, the transfer is valid only if P answers KVLive.

D sends requests, and P answers each with one message. The only thing that P stores about D is the
transfer's name (`reader`). Each transfer has its own socket. Its messages are framed as in wire.py.

Legend: B blocks.
"""

from __future__ import annotations

import msgspec

from protocol.engine.messages import Message
from protocol.wire.arrays import Int32, UInt8

READER_BYTES = 16
"""Number of random bytes in the name of a transfer (`reader`), which D chooses."""
MAX_CHUNK_BYTES = 4 << 20
WINDOW = 4
"""Most chunks that D has requested and not received yet. P never queues more."""


# ---- D -> P


class KVOpen(Message, frozen=True, kw_only=True):
    """D -> P. Open blocks [first, first + count) of the lease, in its order, for reading.

    reader                name of the transfer, in all its messages
    layout, layout_text   describe D's cache, as in KVEndpoint
    needs_state           D also reads the recurrent state after the last of these blocks, which is
                          then the last one of the lease
    """

    lease: bytes
    reader: bytes
    layout: bytes
    layout_text: str = msgspec.field(name="told")
    first: int
    count: int
    needs_state: bool = False


class KVRead(Message, frozen=True, kw_only=True):
    """D -> P, with the mover "zmq". Send one chunk of the opened blocks, or of the state if
    `is_state`. `worker.kv.movers.zmq` defines the order of the chunks of either, which are numbered
    from 0.
    """

    lease: bytes
    reader: bytes
    chunk: int
    is_state: bool = False


class KVDone(Message, frozen=True, kw_only=True):
    """D -> P. The transfer is over: D has read everything, or gives up."""

    lease: bytes
    reader: bytes
    is_read: bool  #: False: D gives up, and expects no answer


# ---- P -> D


class ShmOffer(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="shm", omit_defaults=True
):
    """P -> D. D can map P's cache into its memory, if D runs as the same user on the same host.

    boot            id of the host's kernel boot. If D's host has another id, the other fields mean
                    nothing there
    path            path that opens the memory; `device` and `inode` must match the opened file
    num_bytes       size of the memory, which consists of rows of `num_blocks` blocks each. For
                    states it is one row, and each block is a checkpoint
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
    """P -> D. P sends the chunks that D requests with KVRead, each of at most `chunk_bytes`."""

    chunk_bytes: int


class NixlOffer(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nixl", omit_defaults=True
):
    """P -> D. P's cache is registered with NIXL, so D can read it through NIXL.

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
    """P -> D. The ids [B] of the requested blocks in P's cache, and the ways to read them.

    checkpoint, state_offers   the same for the state, if D needs it
    """

    blocks: Int32
    offers: list[Offer]
    checkpoint: int | None = None
    state_offers: list[Offer] = []


class KVChunk(Message, frozen=True, kw_only=True):
    """P -> D, answering KVRead. One chunk, and the CRC-32 of its data (zlib)."""

    chunk: int
    crc32: int
    data: UInt8


class KVLive(Message, frozen=True, kw_only=True):
    """P -> D, answering KVDone. The lease had not ended when KVDone arrived, so the bytes that D
    has read are valid."""


class KVExpired(Message, frozen=True, kw_only=True):
    """P -> D, answering any message. The lease is over or unknown."""


class KVUnlike(Message, frozen=True, kw_only=True):
    """P -> D, answering KVOpen. D cannot read P's cache; `reason` explains why."""

    reason: str


FromReader = KVOpen | KVRead | KVDone
FromExporter = KVOpened | KVChunk | KVLive | KVExpired | KVUnlike
