"""Simulated requests, and the token ids of their prompts and answers.

A prompt is a path of segments. A segment is a run of tokens with a key. Two segments with the same
key have the same tokens and follow the same segments, so a cache can know a segment by its key.
"""

from __future__ import annotations

import random
import struct
from array import array
from functools import cache
from typing import NamedTuple

import msgspec

from protocol.wire.arrays import Int32

VOCAB_SIZE = 1 << 15
KEY_TOKENS = 3
"""The first tokens of a segment spell its key, so no two segments have the same tokens."""
SHARED_KEYS = 1 << 44
"""Keys of segments that several requests share start here. Lower keys are of one request each."""
MAX_REQUESTS = 1 << 31
"""Most requests of one gateway."""
_POOL_TOKENS = 1 << 20
_STRIDE = 0x9E3779B1  # odd, so that neighbouring keys take different parts of the pool


class Segment(NamedTuple):
    """A run of tokens."""

    key: int
    num_tokens: int


class SimulatedRequest(msgspec.Struct, array_like=True, eq=False):
    """One request of a workload, on its way through the simulated cluster."""

    #: Unique in the workload. It contains the number of the gateway that gets the request.
    number: int
    #: When the client sends it, in seconds since the start of the workload.
    at: float
    path: tuple[Segment, ...]
    input_tokens: int
    output_tokens: int
    #: Key of the answer's tokens, which a later prompt contains; 0: no later prompt does.
    answer_key: int = 0
    #: Names the conversation; "": the request belongs to none.
    session: str = ""
    #: Turns of the conversation that follow.
    num_turns_left: int = 0
    #: When it arrives at a replica, if another replica has refused it before; 0: at `at`.
    retried_at: float = 0.0
    #: Replicas that have refused it.
    tried: list[int] = []

    @property
    def sent_at(self) -> float:
        return self.retried_at or self.at

    @property
    def gateway(self) -> int:
        return self.number // MAX_REQUESTS


def request_number(gateway: int, count: int) -> int:
    """Return the number of a gateway's request `count`."""
    return gateway * MAX_REQUESTS + count


def own_key(number: int, *, is_answer: bool = False) -> int:
    """Return the key of a segment that belongs to one request."""
    return 2 * number + is_answer


def is_answer(key: int) -> bool:
    """Return whether a key is that of an answer."""
    return key < SHARED_KEYS and bool(key & 1)


def prompt_of(path: tuple[Segment, ...]) -> Int32:
    """Return the token ids of a prompt."""
    if len(path) == 1:
        return Int32(_segment_bytes(*path[0]))
    return Int32(b"".join([_segment_bytes(key, num) for key, num in path]))


def segment_tokens(segment: Segment) -> list[int]:
    return Int32(_segment_bytes(*segment)).tolist()


def _segment_bytes(key: int, num_tokens: int) -> bytes:
    head = struct.pack("3i", key & 0x7FFF, key >> 15 & 0x7FFF, key >> 30 & 0x7FFF)
    if num_tokens <= KEY_TOKENS:
        return head[: 4 * num_tokens]
    pool = _pool()
    left = 4 * (num_tokens - KEY_TOKENS)
    start = 4 * (key * _STRIDE % _POOL_TOKENS)
    data = pool[start : start + left]
    while len(data) < left:
        data += pool[: left - len(data)]
    return head + data


@cache
def _pool() -> bytes:
    """Return _POOL_TOKENS random token ids."""
    drawn = array("H", random.Random(0).randbytes(2 * _POOL_TOKENS))
    return array("i", [value % VOCAB_SIZE for value in drawn]).tobytes()
