"""Content hashes of K/V blocks: chained SHA-256.

    hash(block i) = SHA-256(hash(block i - 1) + the block's tokens as little-endian int32)

The chain starts from a root hash of the model, the namespace and the content of the LoRA adapter.
So if two hashes are equal, all tokens from position 0 on are equal, and so are these three. A block
is therefore never found from another namespace, or with another adapter.

If rows of images stand at some positions of a block, the block's hash also covers these positions,
the rows, the digest of the image, and its grid, on which rotary positions depend. So prompts with
equal tokens and different images share no such block.

If a prefix ends within a block, its last tokens are hashed in the same way. The result differs from
the hash of every full block, because a full block has more tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from struct import pack

from protocol.engine.attachments import Attachment

MAX_ROOTS = 1024
"""Maximum number of namespaces and adapters whose root hashes are cached."""


class ContentHashes:
    """Computes block hashes for the token sequences of one model.

    The parameter `hashes` of its methods is the list of a sequence's block hashes, from the first
    block on. The methods extend it as needed. `adapter` is the digest of the adapter; "": none.
    `images` are those in the tokens.
    """

    def __init__(self, model_digest: str, block_tokens: int) -> None:
        self.model_digest = model_digest
        self._block_tokens = block_tokens
        self._roots: dict[tuple[str, str], bytes] = {}

    def extend(
        self,
        hashes: list[bytes],
        namespace: str,
        tokens: array[int],
        num_blocks: int,
        adapter: str = "",
        images: Sequence[Attachment] = (),
    ) -> None:
        """Append to `hashes` until it covers the first `num_blocks` full blocks of `tokens`."""
        root = self._root(namespace, adapter)
        extend_hashes(hashes, root, tokens, self._block_tokens, num_blocks, images)

    def prefix_hash(
        self,
        hashes: list[bytes],
        namespace: str,
        tokens: array[int],
        num_tokens: int,
        adapter: str = "",
        images: Sequence[Attachment] = (),
    ) -> bytes:
        """Return the hash of the first `num_tokens` tokens, extending `hashes` as needed."""
        num_full, rest = divmod(num_tokens, self._block_tokens)
        self.extend(hashes, namespace, tokens, num_full, adapter, images)
        before = hashes[num_full - 1] if num_full else self._root(namespace, adapter)
        if not rest:
            return before
        state = sha256(before)
        state.update(memoryview(tokens)[num_tokens - rest : num_tokens])
        for part in _image_parts(images, num_tokens - rest, num_tokens):
            state.update(part)
        return state.digest()

    def _root(self, namespace: str, adapter: str) -> bytes:
        root = self._roots.get((namespace, adapter))
        if root is None:
            root = root_hash(self.model_digest, namespace, adapter)
            if len(self._roots) < MAX_ROOTS:
                self._roots[namespace, adapter] = root
        return root


def root_hash(model_digest: str, namespace: str, adapter: str = "") -> bytes:
    """Return the root hash of a chain.

    Each part is preceded by its length, so ("a", "bc") and ("ab", "c") have different hashes.
    """
    state = sha256(b"tidegate kv 1")
    for part in (model_digest, namespace, adapter):
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()


def extend_hashes(
    hashes: list[bytes],
    root: bytes,
    tokens: array[int],
    block_tokens: int,
    num_blocks: int,
    images: Sequence[Attachment] = (),
) -> None:
    """Append to `hashes` until it covers the first `num_blocks` full blocks of `tokens`."""
    view = memoryview(tokens)
    for index in range(len(hashes), num_blocks):
        start = index * block_tokens
        state = sha256(hashes[-1] if hashes else root)
        state.update(view[start : start + block_tokens])
        if images:
            for part in _image_parts(images, start, start + block_tokens):
                state.update(part)
        hashes.append(state.digest())


def _image_parts(images: Sequence[Attachment], start: int, end: int) -> Iterator[bytes]:
    """Yield a description of each run of an image's rows at the positions from `start` to `end`: a
    mark, the image, the first row, the first position after `start`, the number of rows, the number
    of those that follow in later blocks, and the grid (zeros: none). In some models the K/V of all
    rows of a run depends on the last ones.

    A full block's tokens have a fixed length, so the hash of a block without images has no such
    description at its end. Descriptions have a fixed length, too.
    """
    for image in images:
        if image.end <= start or image.first >= end:
            continue
        row = 0
        for first, count in image.runs:
            low, high = max(first, start), min(first + count, end)
            if low < high:
                numbers = (row + low - first, low - start, high - low, first + count - high)
                grid = image.grid or (0, 0, 0)
                yield b"image" + bytes.fromhex(image.digest) + pack("<7I", *numbers, *grid)
            row += count
