"""Which grammars are compiled, which are being compiled, and who waits for them. Pure.

Equal grammars are compiled once: a grammar's digest is its name everywhere. The most recently used
are kept. What a compiler says is told to all who wait for it, and to nobody twice.
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
"""Different grammars that may wait to be compiled."""
RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class CompileJob:
    """To be compiled."""

    digest: bytes
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """What came of a job: a template, or why there is none."""

    digest: bytes
    result: MatcherTemplate | ServingError


def digest_of(grammar: Grammar) -> bytes:
    return sha256(msgspec.msgpack.encode(grammar)).digest()


@dataclass
class GrammarCache:
    """`jobs` are for the caller to take and to answer, each with one `settle`, in any order."""

    jobs: list[CompileJob] = field(default_factory=list)
    _kept: OrderedDict[bytes, MatcherTemplate] = field(default_factory=OrderedDict)
    _waiting: dict[bytes, list[Request]] = field(default_factory=dict)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def templates(self) -> Mapping[bytes, MatcherTemplate]:
        """Of the grammars that are kept, by their digest."""
        return self._kept

    def find(self, grammar: Grammar) -> tuple[bytes, MatcherTemplate | None]:
        """Its digest, and its template if there is one. Raises Overloaded where one would be long
        in coming."""
        digest = digest_of(grammar)
        template = self._kept.get(digest)
        if template is not None:
            self._kept.move_to_end(digest)
        elif digest not in self._waiting and len(self._waiting) >= MAX_PENDING:
            raise Overloaded(
                f"{MAX_PENDING} grammars wait to be compiled; try again later",
                retry_after_s=RETRY_S,
            )
        return digest, template

    def wait(self, request: Request, digest: bytes, grammar: Grammar) -> None:
        """`request` waits until this grammar is settled."""
        if digest not in self._waiting:
            self.jobs.append(CompileJob(digest, grammar))
        self._waiting.setdefault(digest, []).append(request)

    def leave(self, request: Request) -> None:
        """`request` waits no more; its grammar is compiled all the same."""
        for waiting in self._waiting.values():
            if request in waiting:
                waiting.remove(request)

    def settle(self, compiled: CompiledGrammar) -> list[Request]:
        """A job has come to its end: those who waited for it, in order of arrival."""
        if isinstance(compiled.result, MatcherTemplate):
            self._kept[compiled.digest] = compiled.result
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return self._waiting.pop(compiled.digest, [])

    def forget(self, digest: bytes) -> None:
        """Something went wrong with it: it is compiled anew when it is next asked for."""
        self._kept.pop(digest, None)
