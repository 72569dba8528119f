"""K/V transfer: from engine P, which computed a prompt, to engine D, which continues from it.

```
 gateway ── Generate(kv_readers=n) ──▶ P engine     computes all of the prompt but its last token
 gateway ◀── Output(finish="length", kv_handle) ──  keeps the blocks under a lease
                 │                                  KVExport ──▶ P worker: may be read
 gateway ── Generate(kv_handle) ──▶ D engine        checks the handle, allocates its own blocks
                                    KVFetch ──▶ D worker ◀── bytes ──▶ P worker
                                    KVReport ◀── fetched; or failed: D computes the prompt again
                                    P worker ── KVReport(taken) ──▶ P engine: the lease is over
```

A handle is a text that names a prompt's K/V. It is sealed (engine_core/kv/seal.py): only engines
that have the cluster key can write or open it. A client that passes a handle on can neither read
nor change it, so no host, port or block id ever comes from a client. A lease is P's promise to keep
the K/V. It ends when all its readers are done, when it is released (`messages.ReleaseKV`), or when
its time is over. `messages.KeepKV` renews it.

The engine decides which blocks are moved, how long a lease lasts, and what to do after a failure.
Workers move bytes and report the result of each job exactly once.

The *tiers* of a worker, host memory and disk, keep blocks that the KV cache has dropped. They find
a block by its key, which is its chained hash (engine_core/blocks/hash.py), and the state after a
block by `state_key`. KVStore copies blocks and states to the tiers, after the commit that published
them. A KVFetch from a TierSource loads them back. The engine fetches only what KVReport.tiers has
reported as stored.

If the model has a recurrent state, K/V is of use only with the state after it. So a lease, a fetch
and the tiers have checkpoints besides blocks: copies of the state after one of the blocks. A
checkpoint has a number of its own in each worker, as a block has.

Legend: B blocks.
"""

from __future__ import annotations

import msgspec

from protocol.engine.messages import Message
from protocol.wire.arrays import Int32

KV_FIELD = "kv_transfer_params"
"""The HTTP field that carries a handle. Errors about a handle name this field as their `param`."""
LEASE_BYTES = 16
"""Number of random bytes in the name of a lease. The name cannot be guessed, so a reader that
presents it has received it from an engine.
"""


_STATE = b"state"
HASH_BYTES = 32
"""Number of bytes in the hash of a block."""


def state_key(content: bytes) -> bytes:
    """Return the key, in a tier, of the state after the block with this hash."""
    return content + _STATE


def is_state_key(key: bytes) -> bool:
    """Return whether a tier keeps a state, and not a block, under this key."""
    return len(key) > HASH_BYTES


def block_hash(key: bytes) -> bytes:
    """Return the hash of the block that is kept under this key, or that the state follows."""
    return key[:HASH_BYTES]


# ---- engine -> worker


class KVExport(Message, frozen=True, kw_only=True):
    """Engine -> worker P. Start a lease: readers that present its name may read its blocks.

    The engine sends this message before the step that computes the last of the blocks, and gives a
    handle to a client only after that step. So the worker has the lease before the first reader
    arrives.

    lease       name of the lease
    blocks      [B] block ids, in the order of the sequence
    readers     number of readers; when all of them are done, KVReport.taken lists the lease
    checkpoint  the checkpoint of the state after the last block. None: the model has no state
    """

    lease: bytes
    blocks: Int32
    readers: int
    checkpoint: int | None = None


class KVWithdraw(Message, frozen=True, kw_only=True):
    """Engine -> worker P. End this lease. Later messages may reuse its blocks, so the worker sends
    no KVLive for the lease from now on. An unknown lease is ignored.
    """

    lease: bytes


class PeerSource(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="peer", omit_defaults=True
):
    """A source of K/V: blocks that another worker exports under a lease.

    address   that worker's address (ZeroMQ)
    lease     name of the lease
    first     index of the first exported block to fetch; D has the earlier blocks already
    """

    address: str
    lease: bytes
    first: int = 0


class TierSource(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tier", omit_defaults=True
):
    """A source of K/V: the worker's own tiers. `hashes` [B] has the hash of each block to fetch. A
    state to fetch is the one after the last of these blocks."""

    hashes: list[bytes]


Source = PeerSource | TierSource


class KVFetch(Message, frozen=True, kw_only=True):
    """Engine -> worker D. Fetch K/V into `blocks`. One entry of a KVReport answers it.

    job         the engine's number for this job, never used again
    source      where to fetch from: the exported block `first + i` of a PeerSource, or the block
                `hashes[i]` of a TierSource, is written to blocks[i]
    blocks      [B] block ids. Each block is written whole, and nothing else reads or writes it
                until the job is over
    timeout_s   seconds after which the job fails
    checkpoint  the checkpoint that the state after the last of these blocks is written to, under
                the same conditions. None: the model has no state
    """

    job: int
    source: Source
    blocks: Int32
    timeout_s: float
    checkpoint: int | None = None


class KVCancel(Message, frozen=True, kw_only=True):
    """Engine -> worker D. Cancel the KVFetch with this job number. The worker reports the job when
    nothing writes to its blocks any more, unless it has reported the job already. An unknown job is
    ignored, because it is over.
    """

    job: int


class KVStore(Message, frozen=True, kw_only=True):
    """Engine -> worker. Copy computed blocks of one sequence, and states after some of its blocks,
    to the tiers that lack them.

    The worker may not be able to store all of them. KVReport.tiers lists what it has stored.

    blocks        [B] block ids, in the order of the sequence; valid until the next plan is sent
    hashes        [B] hash of each block
    checkpoints   [C] checkpoints with the states, likewise. None: there are none
    states        [C] key of each state
    """

    blocks: Int32
    hashes: list[bytes]
    checkpoints: Int32 | None = None
    states: list[bytes] = []


class KVUsed(Message, frozen=True, kw_only=True):
    """Engine -> worker. The blocks and states with these keys were used just now, the last one most
    recently. Tiers evict the least recently used ones.
    """

    keys: list[bytes]


# ---- worker -> engine


class KVFailure(msgspec.Struct, frozen=True, array_like=True):
    """The reason why a job failed. `kind` is one of:

    "expired"      the lease is over
    "unreachable"  the peer is silent or gone
    "damaged"      a checksum is wrong, or an answer does not match its request
    "refused"      the peer's cache has another layout, or the workers have no mover in common
    "timeout"      the job took longer than `timeout_s`
    "cancelled"    the engine cancelled the job
    "lost"         the tier no longer has a block or the state, or the worker has no tiers
    """

    job: int
    kind: str
    message: str


class KVFetched(msgspec.Struct, frozen=True, array_like=True):
    """A job that succeeded: `mover` has fetched `num_bytes` into its blocks in `seconds`."""

    job: int
    num_bytes: int
    seconds: float
    mover: str


class KVTierNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes in one tier since the last report; the first report lists its whole content."""

    #: "host" or "disk".
    tier: str
    #: Keys of blocks and states that can be fetched from now on.
    stored: list[bytes] = []
    #: Keys of those that cannot be fetched any more, or that were not stored.
    lost: list[bytes] = []
    #: Bytes stored now. For a disk: by all models and servers that share the directory.
    num_bytes: int = 0
    #: Number of blocks and states stored since the last report; the next three fields count
    #: likewise.
    num_stored: int = 0
    #: Those that were not stored for lack of space or time.
    num_dropped: int = 0
    #: Those that were loaded.
    num_loaded: int = 0
    #: Those that could not be loaded: gone or damaged.
    num_failed: int = 0


class KVReport(Message, frozen=True, kw_only=True):
    """Worker -> engine, when there is something to report.

    fetched, failed   jobs that are over
    taken             leases whose readers are all done
    tiers             tiers that have changed
    """

    fetched: list[KVFetched] = []
    failed: list[KVFailure] = []
    taken: list[bytes] = []
    tiers: list[KVTierNews] = []


class KVEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker transfers K/V; part of WorkerReady.

    address       address where other workers request its exports (ZeroMQ); "": it exports nothing
    layout        digest of the properties that both workers must share: model digest, dtype, number
                  of layers, heads, head dim, tokens per block, size of the recurrent state
    layout_text   these properties as text, shown if two workers differ
    mover         how the worker moves bytes: "shm", "zmq", "nixl", or "auto"
    """

    address: str
    layout: bytes
    layout_text: str = msgspec.field(name="told")
    mover: str
