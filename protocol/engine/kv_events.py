"""KV events: what an engine tells subscribers about its prefix cache. The schema is vLLM's.

Routers subscribe to the events of all servers, and send a prompt to the server that has cached the
longest part of it. An engine publishes one batch per message, in three frames: the topic, the
sequence number (8 bytes, big-endian), and the batch in MessagePack. Sequence numbers start at 0 and
have no gaps, so a subscriber notices what it has missed.

A subscriber that has missed batches sends the number of the first one (8 bytes, big-endian) to the
replay socket, after an empty frame. The engine answers with the frames of all batches from that one
on that it still keeps, each after an empty frame, and then with an end: an empty topic, the number
-1 and an empty batch.

The events contain the token ids of prompts and answers. So an engine publishes only the events of
the namespaces that its operator has named (`EngineConfig.kv_events_namespace`).
"""

from __future__ import annotations

import msgspec

END_OF_REPLAY = -1
"""Sequence number of the last message of a replay."""
_SEQUENCE_BYTES = 8


class _Change(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A change of the prefix cache: a map with the name of the class in its field "type". As in
    vLLM, fields without a value are sent as nil."""


class BlockStored(_Change, frozen=True, kw_only=True):
    """Consecutive blocks of one sequence can be found in the cache."""

    block_hashes: list[int]
    #: Hash of the block before the first one; None if the first one starts the sequence.
    parent_block_hash: int | None
    #: Token ids of all the blocks.
    token_ids: list[int]
    #: Tokens per block.
    block_size: int
    lora_id: int | None = None
    #: "GPU" is vLLM's name for the KV cache itself, on any device.
    medium: str = "GPU"
    lora_name: str | None = None


class BlockRemoved(_Change, frozen=True, kw_only=True):
    """Blocks were removed from the cache."""

    block_hashes: list[int]
    medium: str = "GPU"


class AllBlocksCleared(_Change, frozen=True, kw_only=True):
    """The cache is empty. It is the first event of an engine."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events in the order in which they happened."""

    #: Time of sending, in seconds since 1970.
    ts: float
    events: list[KVEvent]
    data_parallel_rank: int = 0


def external_hash(content: bytes) -> int:
    """Return the hash of a block as it is published: the last 64 bits of its content hash, as vLLM
    does by default. All subscribers accept integers, and not all of them accept bytes."""
    return int.from_bytes(content[-8:], "big")


def encode_sequence(number: int) -> bytes:
    return number.to_bytes(_SEQUENCE_BYTES, "big", signed=True)


def decode_sequence(frame: bytes) -> int:
    """Return the sequence number in a frame. Raises ValueError if the frame has another length."""
    if len(frame) != _SEQUENCE_BYTES:
        raise ValueError(f"a sequence number has {_SEQUENCE_BYTES} bytes, not {len(frame)}")
    return int.from_bytes(frame, "big", signed=True)
