"""Grammar cache: compiled grammars, compilations in progress, and the requests that wait for them.

A grammar is identified by its digest, so equal grammars are compiled once. The MAX_KEPT most
recently used grammars are kept. The outcome of a compilation goes to all requests that wait for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec

from engine_core.grammar.matcher import MatcherTemplate
from engine_core.request import Request
from protocol.errors import Overloaded, ServingError
from protocol.grammar import Grammar

MAX_KEPT = 128
MAX_PENDING = 256
"""Maximum number of different grammars that wait to be compiled."""
RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A grammar to compile."""

    digest: bytes
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The outcome of a CompileJob: the compiled grammar as a template, or an error."""

    digest: bytes
    result: MatcherTemplate | ServingError


def grammar_digest(grammar: Grammar) -> bytes:
    return sha256(msgspec.msgpack.encode(grammar)).digest()


@dataclass
class GrammarCache:
    """The compiled grammars, and those being compiled."""

    #: Grammars to compile. The caller removes them, and passes the outcome of each to
    #: `on_grammar_compiled`, in any order.
    jobs: list[CompileJob] = field(default_factory=list)
    _templates: OrderedDict[bytes, MatcherTemplate] = field(default_factory=OrderedDict)
    _waiters: dict[bytes, list[Request]] = field(default_factory=dict)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a grammar to be compiled."""
        return sum(map(len, self._waiters.values()))

    @property
    def templates(self) -> Mapping[bytes, MatcherTemplate]:
        """The cached templates by digest."""
        return self._templates

    def find(self, grammar: Grammar) -> tuple[bytes, MatcherTemplate | None]:
        """Return the grammar's digest, and its template if it is cached. Raises Overloaded if the
        grammar is new and too many others wait to be compiled."""
        digest = grammar_digest(grammar)
        template = self._templates.get(digest)
        if template is not None:
            self._templates.move_to_end(digest)
        elif digest not in self._waiters and len(self._waiters) >= MAX_PENDING:
            raise Overloaded(
                f"{MAX_PENDING} grammars are waiting to be compiled; try again later",
                retry_after_s=RETRY_S,
            )
        return digest, template

    def add_waiter(self, request: Request, digest: bytes, grammar: Grammar) -> None:
        """Make `request` wait for this grammar. The first such request creates the job."""
        if digest not in self._waiters:
            self.jobs.append(CompileJob(digest, grammar))
        self._waiters.setdefault(digest, []).append(request)

    def remove_waiter(self, request: Request) -> None:
        """Remove a request that waits for its grammar. The compilation continues."""
        for waiting in self._waiters.values():
            if request in waiting:
                waiting.remove(request)

    def on_grammar_compiled(self, compiled: CompiledGrammar) -> list[Request]:
        """Store a job's outcome, and return the requests that waited for it, oldest first."""
        if isinstance(compiled.result, MatcherTemplate):
            self._templates[compiled.digest] = compiled.result
            if len(self._templates) > MAX_KEPT:
                self._templates.popitem(last=False)
        return self._waiters.pop(compiled.digest, [])

    def remove(self, digest: bytes) -> None:
        """Remove a grammar that failed, so that it is compiled again when it is next used."""
        self._templates.pop(digest, None)
