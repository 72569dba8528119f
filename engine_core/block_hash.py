"""The identity of a block's content: a chained 256-bit hash.

hash(block i) = SHA-256(hash(block i - 1) + its tokens as int32 LE); the chain starts from a root
made of everything else that K/V depends on. So equal hashes mean equal tokens from position 0 on,
computed by the same model for the same namespace. No key of one namespace can find what another
computed.
"""

from __future__ import annotations

from array import array
from hashlib import sha256


def root_hash(model_digest: str, namespace: str, adapter: str = "") -> bytes:
    """Fields are length-prefixed: ("a", "bc") and ("ab", "c") differ."""
    state = sha256(b"tidegate kv 1")
    for part in (model_digest, namespace, adapter):
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()


def extend_hashes(
    hashes: list[bytes], root: bytes, tokens: array[int], block_tokens: int, num_blocks: int
) -> None:
    """Append to `hashes` until it covers the first `num_blocks` full blocks of `tokens`."""
    view = memoryview(tokens)
    for index in range(len(hashes), num_blocks):
        start = index * block_tokens
        state = sha256(hashes[-1] if hashes else root)
        state.update(view[start : start + block_tokens])
        hashes.append(state.digest())
