"""Chooses a replica for each prompt: the one that probably holds its prefix, unless it is too busy.

A replica computes a prompt faster if its prefix cache holds the start of the prompt. The router
imitates each replica's cache: it remembers which prefixes it sent there, and forgets the least
recently used ones when their tokens exceed the size of the cache. It cannot know what other gateway
processes have sent. So the result is a hint: a wrong guess costs time, and never changes an answer.

A prefix is known by a chained hash over its namespace and token ids. Hashes are taken at block
boundaries whose distances grow with the position: four per doubling, as a longer prefix may be
known less exactly. A prompt of 100,000 tokens has about 45 of them.

The score of a replica is its expected cached tokens, minus LOAD_WEIGHT times its load in tokens.
The highest score wins. Among equal scores, rendezvous hashing decides, so that gateway processes
that share no memory tend to choose the same replica for the same prefix.

The module is pure. It is used by the gateway for every prompt, and by the simulator.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

from protocol.engine.stats import EngineLoad
from protocol.wire.arrays import Int32

LOAD_WEIGHT = 0.5
"""Cached tokens that count as much as one token of load. It is less than 1, because a prompt that
is computed on a second replica also evicts blocks there, and because part of the tokens in a queue
will be found in the cache."""
RUNNING_TOKENS = 16
"""Load of one open request, in tokens: each takes part in many steps after its prompt."""
SCAN_LIMIT = 32
"""With more usable replicas than this, only a few of them are compared."""
NUM_SAMPLED = 4
"""How many replicas, chosen at random, are compared in addition to those that hold the prefix, if
there are more than SCAN_LIMIT. Two would avoid most hot spots ("power of two choices")."""
MAX_HOLDERS = 16
"""Most replicas that are compared because they hold a prefix: the latest ones that got it."""
BOUNDARIES_PER_DOUBLING = 4

_HASH_BYTES = 8
_MASK = (1 << 64) - 1

Reason = Literal["prefix", "load", "session"]
"""Why a replica was chosen: it probably holds a prefix of the prompt; it has the least load; the
earlier requests of the session went to it."""


class PrefixHash(NamedTuple):
    """A prefix of a prompt."""

    #: Length of the prefix in tokens.
    num_tokens: int
    #: Hash of the namespace and the prefix.
    digest: bytes


class RoutingDecision(NamedTuple):
    """The replica chosen for a prompt."""

    replica: int
    #: How many of the prompt's tokens the replica probably holds in its prefix cache.
    num_cached: int
    reason: Reason


def prefix_hashes(prompt: Int32, namespace: str, block_tokens: int) -> list[PrefixHash]:
    """Return the hashes of the prompt's prefixes, shortest first; [] for a prompt that does not
    fill a block.

    prompt        [number of tokens] token ids
    block_tokens  tokens in one block of the replicas' caches, which hold whole blocks only
    """
    state = blake2b(namespace.encode(), digest_size=_HASH_BYTES)
    state.update(b"\0")
    data, size = prompt.data, block_tokens * Int32.itemsize
    num_blocks, block, stride, found = len(data) // size, 0, 1, []
    while (end := block + stride) <= num_blocks:
        state.update(data[block * size : end * size])
        found.append(PrefixHash(end * block_tokens, state.digest()))
        block = end
        if block >= 2 * BOUNDARIES_PER_DOUBLING * stride:
            stride *= 2
    return found


@dataclass(slots=True)
class ReplicaLoad:
    """The load of a replica: its last report, plus the requests that were sent since."""

    #: Requests that are running or waiting, and the tokens to compute before a new prompt's turn:
    #: from the replica's last report, plus the requests that it has accepted since.
    num_open: int = 0
    queued_tokens: int = 0
    #: Requests that this process has sent and the replica has not accepted yet, and their tokens.
    #: Its next report does not include them.
    num_sent: int = 0
    sent_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The load in tokens."""
        return (
            self.queued_tokens + self.sent_tokens + RUNNING_TOKENS * (self.num_open + self.num_sent)
        )

    def on_sent(self, num_tokens: int) -> None:
        """Add a request. `num_tokens` of its prompt are probably not cached."""
        self.num_sent += 1
        self.sent_tokens += num_tokens

    def on_answered(self, num_tokens: int, *, is_accepted: bool) -> None:
        """Handle the reply to a request that was added by `on_sent` with the same `num_tokens`."""
        self.num_sent -= 1
        self.sent_tokens -= num_tokens
        if is_accepted:
            self.num_open += 1
            self.queued_tokens += num_tokens

    def on_report(self, load: EngineLoad) -> None:
        """Handle the load in a message of the replica. It includes all that the replica has
        accepted before, because messages arrive in order."""
        self.num_open = load.running + load.waiting
        self.queued_tokens = load.queued_tokens


class _ImitatedCache:
    """The prefixes that a replica's cache probably holds, and their sizes.

    capacity   size of the cache in tokens
    """

    __slots__ = ("_capacity", "_num_tails", "_tokens", "entries")

    def __init__(self, capacity: int) -> None:
        #: Digest of a prefix -> its tokens that no shorter entry counts; in the order of their last
        #: use. The ends of prompts, which are not looked up, have numbers instead of digests.
        self.entries: OrderedDict[bytes | int, int] = OrderedDict()
        self._capacity = capacity
        self._tokens = 0
        self._num_tails = 0

    def add(self, hashes: Sequence[PrefixHash], num_tokens: int) -> list[bytes]:
        """Add a prompt of `num_tokens` tokens. Return its digests that were not there.

        Of one prompt, the cache evicts the end first. So the longest prefix is added first.
        """
        entries, new = self.entries, []
        tail = num_tokens - (hashes[-1].num_tokens if hashes else 0)
        if tail > 0:
            self._num_tails += 1
            entries[self._num_tails] = tail
            self._tokens += tail
        for place in range(len(hashes) - 1, -1, -1):
            end, digest = hashes[place]
            if digest in entries:
                entries.move_to_end(digest)
            else:
                size = end - (hashes[place - 1].num_tokens if place else 0)
                entries[digest] = size
                self._tokens += size
                new.append(digest)
        return new

    def evict(self, max_entries: int) -> list[bytes]:
        """Remove the least recently used entries that do not fit. Return their digests."""
        entries, gone = self.entries, []
        while self._tokens > self._capacity or len(entries) > max_entries:
            digest, size = entries.popitem(last=False)
            self._tokens -= size
            if isinstance(digest, bytes):
                gone.append(digest)
        return gone


class PrefixRouter:
    """The prefixes that each replica probably holds, and the choice of a replica for a prompt.

    A replica has a number, which is never given to another one: a replica that was restarted has an
    empty cache and gets a new number.

    max_entries   most prefixes that are remembered, of all replicas together
    max_sessions  most sessions that are remembered; the least recently used are forgotten
    seed          of the random choice among more than SCAN_LIMIT replicas
    """

    def __init__(
        self, *, max_entries: int = 1 << 20, max_sessions: int = 1 << 16, seed: int = 0
    ) -> None:
        self.loads: dict[int, ReplicaLoad] = {}
        self._max_entries, self._max_sessions = max_entries, max_sessions
        self._caches: dict[int, _ImitatedCache] = {}
        #: Digest of a prefix -> the replicas that probably hold it, the latest first.
        self._holders: dict[bytes, tuple[int, ...]] = {}
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._salts: dict[int, int] = {}
        #: The usable replicas, and the place of each in that list.
        self._usable: list[int] = []
        self._places: dict[int, int] = {}
        self._random = random.Random(seed)
        self._next_number = 0

    def __len__(self) -> int:
        """Return the number of remembered prefixes."""
        return len(self._holders)

    def add(self, name: str, cache_tokens: int = 1 << 40) -> int:
        """Add a replica, which is not usable yet. Return its number.

        name           identifies the replica to all gateway processes, such as its address
        cache_tokens   size of its prefix cache in tokens
        """
        number, self._next_number = self._next_number, self._next_number + 1
        self.loads[number] = ReplicaLoad()
        self._caches[number] = _ImitatedCache(cache_tokens)
        salt = blake2b(name.encode(), digest_size=_HASH_BYTES).digest()
        self._salts[number] = int.from_bytes(salt)
        return number

    def remove(self, replica: int) -> None:
        """Remove a replica, and forget its prefixes."""
        self.set_usable(replica, is_usable=False)
        self._forget(replica, [d for d in self._caches.pop(replica).entries if type(d) is bytes])
        del self.loads[replica], self._salts[replica]

    def set_usable(self, replica: int, *, is_usable: bool) -> None:
        """Change whether `replica` can be chosen."""
        place = self._places.get(replica)
        if is_usable and place is None:
            self._places[replica] = len(self._usable)
            self._usable.append(replica)
        elif not is_usable and place is not None:
            last = self._usable.pop()
            del self._places[replica]
            if last != replica:
                self._usable[place], self._places[last] = last, place

    def is_usable(self, replica: int) -> bool:
        return replica in self._places

    @property
    def usable(self) -> Sequence[int]:
        """The usable replicas, in no particular order."""
        return self._usable

    def choose(
        self,
        hashes: Sequence[PrefixHash],
        *,
        session: str = "",
        exclude: Collection[int] = (),
    ) -> RoutingDecision | None:
        """Return the replica for a prompt; None if no replica is usable.

        hashes    of the prompt's prefixes
        session   requests of one session go to one replica while it is usable; "": no session
        exclude   replicas that must not be chosen
        """
        cached_by = self._find(hashes, exclude)
        if session and (own := self._sessions.get(session)) in self._places and own not in exclude:
            assert own is not None
            return RoutingDecision(own, cached_by.get(own, 0), "session")
        candidates: Iterable[int] = self._usable
        if len(self._usable) > SCAN_LIMIT:
            candidates = {*cached_by, *self._sample()}
        # Without a full block there is no prefix, and any replica will do.
        anchor = int.from_bytes(hashes[0].digest) if hashes else self._random.getrandbits(64)
        loads, salts = self.loads, self._salts
        best, best_score, best_weight = -1, 0.0, 0
        for replica in candidates:
            if replica in exclude:
                continue
            score = cached_by.get(replica, 0) - LOAD_WEIGHT * loads[replica].tokens
            if best >= 0 and score < best_score:
                continue
            weight = _mix(anchor ^ salts[replica])
            if best < 0 or score > best_score or weight > best_weight:
                best, best_score, best_weight = replica, score, weight
        if best < 0:
            return None
        num_cached = cached_by.get(best, 0)
        return RoutingDecision(best, num_cached, "prefix" if num_cached else "load")

    def on_sent(
        self,
        hashes: Sequence[PrefixHash],
        replica: int,
        num_uncached: int,
        *,
        prompt_tokens: int = 0,
        session: str = "",
    ) -> None:
        """Remember that a prompt was sent to `replica`, which will therefore hold its prefixes.

        num_uncached    tokens of the prompt that are probably not cached; see `ReplicaLoad.on_sent`
        prompt_tokens   length of the prompt, whose end takes space in the cache as well
        """
        self.loads[replica].on_sent(num_uncached)
        cache, holders = self._caches[replica], self._holders
        for digest in cache.add(hashes, prompt_tokens):
            holders[digest] = (replica, *holders.get(digest, ())[: MAX_HOLDERS - 1])
        self._forget(replica, cache.evict(self._max_entries // len(self._caches)))
        if session:
            self._sessions[session] = replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)

    def _forget(self, replica: int, digests: Iterable[bytes]) -> None:
        for digest in digests:
            known = self._holders.get(digest, ())
            left = tuple([other for other in known if other != replica])
            if left:
                self._holders[digest] = left
            else:
                self._holders.pop(digest, None)

    def _find(self, hashes: Sequence[PrefixHash], exclude: Collection[int]) -> dict[int, int]:
        """Return replica -> number of tokens of the longest prefix that it probably holds, for the
        usable replicas that hold one."""
        found: dict[int, int] = {}
        for num_tokens, digest in reversed(hashes):
            for replica in self._holders.get(digest, ()):
                if replica in self._places and replica not in exclude:
                    found.setdefault(replica, num_tokens)
            if len(found) >= MAX_HOLDERS:
                break
        return found

    def _sample(self) -> list[int]:
        """Return replicas chosen at random; one may occur twice."""
        usable, size, draw = self._usable, len(self._usable), self._random.random
        return [usable[int(draw() * size)] for _ in range(NUM_SAMPLED)]


def _mix(value: int) -> int:
    """Return `value`, 64 bits, mixed so that every bit of the result depends on all bits of it (the
    finalizer of MurmurHash3)."""
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & _MASK
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & _MASK
    return value ^ value >> 33
