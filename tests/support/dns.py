"""Messages of the Domain Name System (RFC 1035), as far as a name server of a test needs them."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass

A, IN = 1, 1
"""The type of a question for IPv4 addresses, and the class of the internet."""
_HEAD = struct.Struct("!6H")
_RECORD = struct.Struct("!HHHIH4s")
_NAME_OF_QUESTION = 0xC000 | _HEAD.size
"""A pointer to the name in the first question, in place of the same name."""
_IS_ANSWER, _IS_RECURSIVE, _NO_SUCH_NAME = 0x8000, 0x0080, 3


@dataclass(frozen=True, slots=True)
class NameQuestion:
    """The first question of a message.

    data  the question's bytes in the message
    """

    name: str
    kind: int
    data: bytes


def question_of(query: bytes) -> NameQuestion:
    """Return the question of a resolver's message. Raises IndexError or struct.error if it is
    damaged."""
    labels, place = [], _HEAD.size
    while size := query[place]:
        labels.append(query[place + 1 : place + 1 + size].decode("latin-1"))
        place += 1 + size
    kind, _ = struct.unpack_from("!HH", query, place + 1)
    return NameQuestion(".".join(labels).lower(), kind, query[_HEAD.size : place + 5])


def answer_to(query: bytes, addresses: Sequence[str] | None) -> bytes:
    """Return the answer to a query. Its IPv4 addresses may not be kept by the resolver (their time
    to live is 0).

    addresses   those of the name; None: there is no such name
    """
    question = question_of(query)
    number, flags, *_ = _HEAD.unpack_from(query)
    found = addresses if addresses is not None and question.kind == A else ()
    flags |= _IS_ANSWER | _IS_RECURSIVE | (_NO_SUCH_NAME if addresses is None else 0)
    records = [
        _RECORD.pack(_NAME_OF_QUESTION, A, IN, 0, 4, ipaddress.IPv4Address(address).packed)
        for address in found
    ]
    return b"".join([_HEAD.pack(number, flags, 1, len(found), 0, 0), question.data, *records])
