"""A grammar to compile, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import msgspec

from engine_core.grammar.matcher import MatcherTemplate
from protocol.engine.grammar import Grammar
from protocol.wire.errors import ServingError

RETRY_S = 5.0
"""What a client is told to wait, in seconds, if grammars take too much time or memory now."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A grammar to compile, and the account whose request needs it."""

    digest: bytes
    grammar: Grammar
    account: str = ""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The outcome of a CompileJob: the compiled grammar as a template, or an error.

    num_bytes  the memory that the template keeps
    """

    digest: bytes
    result: MatcherTemplate | ServingError
    num_bytes: int = 0


def grammar_digest(grammar: Grammar) -> bytes:
    return sha256(msgspec.msgpack.encode(grammar)).digest()
