"""The handle of a prompt's K/V in another engine. kv/seal.py makes a sealed text of it."""

from __future__ import annotations

import msgspec


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """Names the K/V that one engine (P) keeps for others (D). P sends its sealed text to the
    client, which sends it to D with a request for the same prompt."""

    #: The lease under which the K/V is kept.
    lease: bytes
    #: Identifies the life of engine P that holds the lease.
    epoch: str
    #: Address at which P's worker serves K/V.
    address: str
    #: Number of tokens with K/V, from position 0 on.
    num_tokens: int
    #: Digest of the K/V layout (KVEndpoint.layout).
    layout: bytes
    #: The layout as text, for error messages.
    layout_text: str
    #: Hash of the model, the namespace, the adapter and the tokens with K/V (blocks/hash.py).
    content: bytes
