"""K/V transfer: from engine P, which computed a prompt, to engine D, which continues from it.

```
 gateway ── Generate(kv_readers=n) ──▶ P engine     computes all of the prompt but its last token
 gateway ◀── Output(finish="length", kv_handle) ──  keeps the blocks under a lease
                 │                                  KVExport ──▶ P worker: may be read
 gateway ── Generate(kv_handle) ──▶ D engine        checks the handle, allocates its own blocks
                                    KVFetch ──▶ D worker ◀── bytes ──▶ P worker
                                    KVReport ◀── fetched, or failed: then D computes it again
                                    P worker ── KVReport(taken) ──▶ P engine: the lease is over
```

A handle is sealed (engine_core/kv/handle.py): only engines that hold the cluster key can write or
open one. A client that carries it can neither read nor change it, and no host, port or block id
ever comes from a client. A lease ends when all its readers are done, when it is released
(`messages.ReleaseKV`), or when its time is over; `messages.KeepKV` renews it.

The engine makes all decisions: which blocks, how long, what to do after a failure. Workers move
bytes and report the result of each job exactly once.

A worker's *tiers*, host memory and disk, keep blocks that the KV cache has dropped, under their
chained hash (engine_core/blocks/hash.py). KVStore fills them, after the commit that published the
blocks. A KVFetch from a TierSource loads them back. The engine counts on exactly the blocks that
KVReport.tiers has reported.

Legend: B blocks.
"""

from __future__ import annotations

import msgspec

from protocol.arrays import Int32
from protocol.messages import Message

KV_FIELD = "kv_transfer_params"
"""The HTTP field that carries a handle; errors about a handle name it as the field at fault."""
LEASE_BYTES = 16
"""Random bytes in a lease's name. They cannot be guessed, so only an engine can have given the
name.
"""


# ---- engine -> worker


class KVExport(Message, frozen=True, kw_only=True):
    """Engine -> worker P. Allow readers that name this lease to read these blocks.

    Sent before the step that computes the last of the blocks; the name of the lease is given to a
    client only after that step. So the worker has the lease before the first reader arrives.

    blocks      [B] ids, in the order of the sequence
    readers     number of readers; after that many are done, KVReport.taken lists the lease
    """

    lease: bytes
    blocks: Int32
    readers: int


class KVWithdraw(Message, frozen=True, kw_only=True):
    """Engine -> worker P. End the lease. Later messages may reuse its blocks, so no reader gets
    KVLive after this. An unknown lease is not an error.
    """

    lease: bytes


class PeerSource(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="peer", omit_defaults=True
):
    """The export of another worker.

    address   that worker's address (ZeroMQ)
    lease     name of the lease
    first     index of the first block of the export to fetch; earlier ones are present already
    """

    address: str
    lease: bytes
    first: int = 0


class TierSource(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tier", omit_defaults=True
):
    """A source of K/V: the worker's own tiers. `hashes` [B] has one hash for each block."""

    hashes: list[bytes]


Source = PeerSource | TierSource


class KVFetch(Message, frozen=True, kw_only=True):
    """Engine -> worker D. Fill these blocks. Answered by exactly one entry of a KVReport.

    job         the engine's number for this job, never used again
    source      where the content is: block `first + i`, or `hashes[i]`, is written to blocks[i]
    blocks      [B] ids, not read or written by anything else until the job is over; written whole
    timeout_s   seconds after which the job has failed
    """

    job: int
    source: Source
    blocks: Int32
    timeout_s: float


class KVCancel(Message, frozen=True, kw_only=True):
    """Engine -> worker D. Cancel this job. Its report is sent as soon as nothing writes to its
    blocks any more, unless it was sent already. An unknown job is over, and no error.
    """

    job: int


class KVStore(Message, frozen=True, kw_only=True):
    """Engine -> worker. Copy these computed blocks of one sequence, in its order, to the tiers that
    do not have them. Their content is valid until the next plan is sent. Best effort: the only
    answer is KVReport.tiers.

    blocks    [B] ids
    hashes    [B] hashes of their content
    """

    blocks: Int32
    hashes: list[bytes]


class KVUsed(Message, frozen=True, kw_only=True):
    """Engine -> worker. Mark these hashes as used, the last one most recently, for eviction."""

    hashes: list[bytes]


# ---- worker -> engine


class KVFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a job failed. `kind` is one of:

    "expired"      the lease is over
    "unreachable"  the peer is silent or gone
    "damaged"      a checksum is wrong
    "refused"      the peer's cache has another layout
    "timeout"      it took longer than `timeout_s`
    "cancelled"    the engine cancelled it
    "lost"         the tier no longer has the block
    """

    job: int
    kind: str
    message: str


class KVFetched(msgspec.Struct, frozen=True, array_like=True):
    """A finished job: its blocks are filled. `mover` fetched `num_bytes` in `seconds`."""

    job: int
    num_bytes: int
    seconds: float
    mover: str


class KVTierNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes in one tier since the last report; the first report lists its whole content."""

    #: "host" or "disk".
    tier: str
    #: Hashes that can be fetched now.
    stored: list[bytes] = []
    #: Hashes that cannot be fetched, or no longer.
    lost: list[bytes] = []
    #: Bytes held now. For a disk: of all models and servers that share the directory.
    num_bytes: int = 0
    #: Blocks that were stored.
    num_stored: int = 0
    #: Blocks that were not stored for lack of space or time.
    num_dropped: int = 0
    #: Blocks that were loaded.
    num_loaded: int = 0
    #: Blocks that could not be loaded: gone or damaged.
    num_failed: int = 0


class KVReport(Message, frozen=True, kw_only=True):
    """Worker -> engine, whenever there is something to report: jobs that are over, leases that all
    readers have finished, and tiers that have changed.
    """

    fetched: list[KVFetched] = []
    failed: list[KVFailure] = []
    taken: list[bytes] = []
    tiers: list[KVTierNews] = []


class KVEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker transfers K/V; part of WorkerReady.

    address   where other workers request its exports (ZeroMQ); "": it exports nothing
    layout    digest of all that both ends must have in common: model digest, dtype, layers, heads,
              head dim, tokens per block
    told      the layout as text, shown if two workers differ
    mover     how it moves bytes: "shm", "zmq", "nixl", or "auto"
    """

    address: str
    layout: bytes
    told: str
    mover: str
