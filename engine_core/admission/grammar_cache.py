"""Grammar cache: compiled grammars, compilations in progress, and the requests that wait for them.

A grammar is identified by its digest, so equal grammars are compiled once. The outcome of a
compilation goes to all requests that wait for it.

The cache is bounded by the measured size of what it holds:

- Grammars that no open request uses take at most MAX_KEPT_BYTES together. The least recently used
  are dropped first.
- Grammars of open requests cannot be dropped. If they take MAX_USED_BYTES, requests with further
  grammars are refused until some end.
- Grammars that wait to be compiled are bounded in number and in length. An account that has less
  than an equal part of them is accepted even if there are too many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine_core.grammar.jobs import RETRY_S, CompiledGrammar, CompileJob, grammar_digest
from engine_core.grammar.matcher import MatcherTemplate
from engine_core.requests.request import Request
from protocol.engine.grammar import Grammar, num_chars
from protocol.wire.errors import Overloaded

MIN_TEMPLATE_BYTES = 256 << 10
"""Smallest size that a compiled grammar counts with. It leaves space for what llguidance adds while
answers use the grammar."""
MAX_TEMPLATE_BYTES = 48 << 20
"""Largest size that a compiled grammar counts with. Measured sizes above it include the memory of
other compilations, because the limits on grammars allow no more."""
MAX_KEPT_BYTES = 24 << 20
MAX_USED_BYTES = 256 << 20
MAX_PENDING = 256
"""Maximum number of different grammars that wait to be compiled."""
MAX_PENDING_CHARS = 8 << 20
"""Maximum number of characters in all grammars that wait to be compiled."""


@dataclass(slots=True)
class CachedGrammar:
    """A compiled grammar in the cache."""

    template: MatcherTemplate
    num_bytes: int
    #: Number of open requests with a matcher of this grammar.
    num_users: int = 0
    #: Whether an answer failed in it. Then it is compiled again for the next request.
    has_failed: bool = False


@dataclass(slots=True)
class PendingGrammar:
    """A grammar that is being compiled or waits to be compiled, and the requests that need it."""

    num_chars: int
    #: The accounts for which there is a job.
    accounts: set[str] = field(default_factory=set)
    requests: list[Request] = field(default_factory=list)


def account_name(request: Request) -> str:
    return "" if request.account is None else request.account.name


@dataclass
class GrammarCache:
    """The compiled grammars, and those being compiled."""

    #: Grammars to compile. The caller removes them, and passes the outcome of each to
    #: `on_grammar_compiled`, in any order. If requests of several accounts wait for one grammar,
    #: each account has a job; one outcome is enough.
    jobs: list[CompileJob] = field(default_factory=list)
    #: Total size of the templates that were dropped.
    num_dropped_bytes: int = 0
    #: By digest, least recently used first.
    _cached: OrderedDict[bytes, CachedGrammar] = field(default_factory=OrderedDict)
    _pending: dict[bytes, PendingGrammar] = field(default_factory=dict)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a grammar to be compiled."""
        return sum(len(pending.requests) for pending in self._pending.values())

    @property
    def cached(self) -> Mapping[bytes, CachedGrammar]:
        """The cached grammars by digest."""
        return self._cached

    def find(self, grammar: Grammar, account: str = "") -> tuple[bytes, MatcherTemplate | None]:
        """Return the grammar's digest, and its template if it is cached. Raises Overloaded if the
        grammar is new and too many others wait to be compiled."""
        digest = grammar_digest(grammar)
        cached = self._cached.get(digest)
        if cached is not None:
            self._cached.move_to_end(digest)
            if not cached.has_failed:
                return digest, cached.template
        if digest not in self._pending:
            self._check_pending(account)
        return digest, None

    def add_waiter(self, request: Request, digest: bytes, grammar: Grammar) -> None:
        """Make `request` wait for this grammar. The first such request of an account creates a
        job."""
        pending = self._pending.get(digest)
        if pending is None:
            pending = self._pending[digest] = PendingGrammar(num_chars(grammar))
        account = account_name(request)
        if account not in pending.accounts:
            pending.accounts.add(account)
            self.jobs.append(CompileJob(digest, grammar, account))
        pending.requests.append(request)

    def remove_waiter(self, request: Request) -> None:
        """Remove a request that waits for its grammar. The compilation continues."""
        for pending in self._pending.values():
            if request in pending.requests:
                pending.requests.remove(request)

    def on_grammar_compiled(self, compiled: CompiledGrammar) -> list[Request]:
        """Store a job's outcome, and return the requests that waited for it, oldest first. The
        caller then adds the users of the grammar, and calls `shrink`."""
        if isinstance(compiled.result, MatcherTemplate):
            size = min(max(compiled.num_bytes, MIN_TEMPLATE_BYTES), MAX_TEMPLATE_BYTES)
            before = self._cached.pop(compiled.digest, None)
            num_users = 0 if before is None else before.num_users
            self._cached[compiled.digest] = CachedGrammar(compiled.result, size, num_users)
        pending = self._pending.pop(compiled.digest, None)
        return [] if pending is None else pending.requests

    def add_user(self, digest: bytes) -> None:
        """Note that one more open request uses a cached grammar. Raises Overloaded if the grammars
        of open requests take too much memory; the request is then not counted."""
        cached = self._cached[digest]
        if not cached.num_users and self._used_bytes() + cached.num_bytes > MAX_USED_BYTES:
            raise Overloaded(
                f"the grammars of open requests take {self._used_bytes() >> 20:,} MiB; "
                "try again later",
                retry_after_s=RETRY_S,
            )
        cached.num_users += 1

    def remove_user(self, digest: bytes, *, has_failed: bool = False) -> None:
        """Note that an open request with this grammar ends. `has_failed` is whether its answer
        failed in the grammar."""
        cached = self._cached[digest]
        cached.num_users -= 1
        cached.has_failed = cached.has_failed or has_failed
        if cached.has_failed and not cached.num_users:
            self._drop(digest)
        self.shrink()

    def shrink(self) -> None:
        """Drop grammars that no open request uses, until the others are within the limit."""
        kept = sum(cached.num_bytes for cached in self._cached.values() if not cached.num_users)
        for digest, cached in list(self._cached.items()):
            if kept <= MAX_KEPT_BYTES:
                break
            if not cached.num_users:
                self._drop(digest)
                kept -= cached.num_bytes

    def _drop(self, digest: bytes) -> None:
        self.num_dropped_bytes += self._cached.pop(digest).num_bytes

    def _used_bytes(self) -> int:
        return sum(cached.num_bytes for cached in self._cached.values() if cached.num_users)

    def _check_pending(self, account: str) -> None:
        """Raise Overloaded if too many grammars wait and the account has at least an equal share of
        the limit, or if twice too many wait."""
        pending = self._pending.values()
        load = max(len(pending) / MAX_PENDING, _chars(pending) / MAX_PENDING_CHARS)
        if load < 1:
            return
        own = [each for each in pending if account in each.accounts]
        own_load = max(len(own) / MAX_PENDING, _chars(own) / MAX_PENDING_CHARS)
        num_accounts = len({account}.union(*(each.accounts for each in pending)))
        if load >= 2 or own_load * num_accounts >= 1:
            raise Overloaded(
                f"{len(pending)} grammars are waiting to be compiled; try again later",
                retry_after_s=RETRY_S,
            )


def _chars(pending: Iterable[PendingGrammar]) -> int:
    return sum(each.num_chars for each in pending)
