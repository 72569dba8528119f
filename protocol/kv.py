"""K/V that changes hands: from the engine that computed a prompt to the one that goes on from it.

```
 gateway ── Generate(kv_readers=n) ──▶ P engine     computes all of the prompt but its last token
 gateway ◀── Output(finish="length", kv_handle) ──  keeps the blocks under a lease
                 │                                  KVExport ──▶ P worker: may be read
 gateway ── Generate(kv_handle) ──▶ D engine        checks the handle, takes blocks of its own
                                    KVFetch ──▶ D worker ◀── bytes ──▶ P worker
                                    KVReport ◀── fetched, or failed: then D computes it again
                                    P worker ── KVReport(taken) ──▶ P engine: the lease is over
```

A handle is a sealed envelope (engine_core/kv/handle.py): only engines that hold the cluster's key
can write or open one. Whoever carries it learns nothing and can change nothing: no host, port or
block id ever comes from a client. A lease ends when all its readers are done, when it is released
(`messages.ReleaseKV`), or by time; `messages.KeepKV` moves that time.

The engine decides, as everywhere: which blocks, how long, what if it fails. Workers move bytes, and
say what became of each job exactly once.

A worker's own *tiers*, host memory and disk, keep blocks beyond their time in the KV cache, under
their chained hash (engine_core/blocks/hash.py). KVStore fills them, behind the commit that
published the blocks; a KVFetch from a TierSource brings them back; what they hold is what
KVReport.tiers has told, and nothing is guessed.

Legend: B blocks.
"""

from __future__ import annotations

import msgspec

from protocol.arrays import Int32
from protocol.messages import Message

KV_FIELD = "kv_transfer_params"
"""The field at fault where a handle is: what HTTP clients call it."""
LEASE_BYTES = 16
"""A lease's name is so many random bytes: who knows it has been told it by an engine."""


# ---- engine -> worker


class KVExport(Message, frozen=True, kw_only=True):
    """Engine -> worker P: from now on, whoever names this lease may read these blocks.

    Said before the step that computes the last of it, and nobody is told the lease's name before
    that step is done: so the worker knows the lease when the first reader comes.

    blocks      [B] ids, in the order of the sequence
    readers     how many will come; when so many are done, KVReport.taken has the lease
    """

    lease: bytes
    blocks: Int32
    readers: int


class KVWithdraw(Message, frozen=True, kw_only=True):
    """Engine -> worker P: the lease is over. Whatever the engine says next may reuse its blocks: no
    reader is told after this that what it has read is right. An unknown lease is no error."""

    lease: bytes


class PeerSource(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="peer", omit_defaults=True
):
    """Another worker's export.

    address   where that worker is asked (ZeroMQ)
    lease     under which name
    first     the first block of the export that is wanted; those before are here already
    """

    address: str
    lease: bytes
    first: int = 0


class TierSource(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tier", omit_defaults=True
):
    """The worker's own tiers: hashes [B], of each block."""

    hashes: list[bytes]


Source = PeerSource | TierSource


class KVFetch(Message, frozen=True, kw_only=True):
    """Engine -> worker D: fill these blocks. Answered by exactly one entry of a KVReport.

    job         the engine's number for it, never used again
    source      where the content is: its block `first + i`, or `hashes[i]`, belongs into blocks[i]
    blocks      [B] ids that nobody else reads or writes until the job is over; written whole
    timeout_s   then it has failed
    """

    job: int
    source: Source
    blocks: Int32
    timeout_s: float


class KVCancel(Message, frozen=True, kw_only=True):
    """Engine -> worker D: give this job up. Its report, if it is not on its way already, comes as
    soon as nothing writes into its blocks any more. An unknown job is over, and no error."""

    job: int


class KVStore(Message, frozen=True, kw_only=True):
    """Engine -> worker: these blocks of one sequence, in its order, are computed; keep a copy where
    there is none. They are as they should be until the next plan that is sent. Best effort: nothing
    answers but the news of tiers.

    blocks    [B] ids
    hashes    [B] what they hold
    """

    blocks: Int32
    hashes: list[bytes]


class KVUsed(Message, frozen=True, kw_only=True):
    """Engine -> worker: these were of use, the last one last; of what the tiers hold, others go
    first."""

    hashes: list[bytes]


# ---- worker -> engine


class KVFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a job failed. kind: "expired" (the lease is over), "unreachable" (the peer is silent, or
    went away), "damaged" (a checksum), "refused" (the peer's layout is another), "timeout",
    "cancelled" (as the engine asked), "lost" (a tier has it no more)."""

    job: int
    kind: str
    message: str


class KVFetched(msgspec.Struct, frozen=True, array_like=True):
    """A job is done: its blocks hold what was asked for. `num_bytes` in `seconds`, by `mover`."""

    job: int
    num_bytes: int
    seconds: float
    mover: str


class KVTierNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one tier, since its last news; at first, all that it holds.

    tier        "host" or "disk"
    stored, lost   hashes that can, and cannot (any more), be fetched
    num_bytes   that it holds now, of a disk: for all models and servers that share the directory
    num_stored, num_dropped   blocks that were to be stored, and were; and had no room or time
    num_loaded, num_failed    blocks that were to be fetched, and were; and were gone or damaged
    """

    tier: str
    stored: list[bytes] = []
    lost: list[bytes] = []
    num_bytes: int = 0
    num_stored: int = 0
    num_dropped: int = 0
    num_loaded: int = 0
    num_failed: int = 0


class KVReport(Message, frozen=True, kw_only=True):
    """Worker -> engine, whenever there is news: jobs that are over, leases that all their readers
    have done with, tiers whose content has changed."""

    fetched: list[KVFetched] = []
    failed: list[KVFailure] = []
    taken: list[bytes] = []
    tiers: list[KVTierNews] = []


class KVEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker that hands over K/V says of itself, with WorkerReady.

    address   where other workers ask for its exports (ZeroMQ); "": it exports nothing
    layout    digest of what both ends must have alike: the model's digest, dtype, layers, heads,
              head dim, tokens of a block
    told      the same for people, to be shown where two differ
    mover     how it moves bytes: "shm", "zmq", "nixl", or "auto"
    """

    address: str
    layout: bytes
    told: str
    mover: str
