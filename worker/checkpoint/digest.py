"""Digest of a model's files: equal for equal files, different for different models.

The digest is part of every prefix-cache hash, so two models must never have the same one. Files of
up to FULL_BYTES in total are hashed whole, which takes about 0.1 s per 200 MB. Reading larger files
would take most of the start-up time, so their digest covers only the size of each file, its first
and last HEAD_BYTES, and evenly spaced samples. The first bytes of a safetensors file usually hold
the names and offsets of its tensors. In a GGUF file, a large vocabulary may come before them.

Fine-tuning changes nearly all weights, so the samples of two real models differ. Samples do not
detect single bytes that were altered on purpose.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

FULL_BYTES = 1 << 30
HEAD_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 12
NUM_SAMPLES = 4096


def digest(paths: list[Path], *extra: bytes) -> str:
    """Return the hex digest of the files, in the given order, and of `extra`: the SHA-256 of the
    SHA-256 digests of all these.

    If the files have more than FULL_BYTES in total, the SHA-256 of a file covers only its size, its
    ends and samples of it (`sampled`).
    """
    total = sum(path.stat().st_size for path in paths)
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            if total <= FULL_BYTES:
                part = hashlib.file_digest(file, "sha256").digest()
            else:
                part = sampled(file, path.stat().st_size)
        whole.update(part)
    for text in extra:
        whole.update(hashlib.sha256(text).digest())
    return whole.hexdigest()


def sampled(file: BinaryIO, size: int) -> bytes:
    """Return the SHA-256 of the size, both ends, and NUM_SAMPLES evenly spaced samples."""
    taken = hashlib.sha256(size.to_bytes(8, "little"))
    taken.update(file.read(HEAD_BYTES))
    for index in range(NUM_SAMPLES):
        file.seek(size * index // NUM_SAMPLES)
        taken.update(file.read(SAMPLE_BYTES))
    file.seek(max(0, size - HEAD_BYTES))
    taken.update(file.read(HEAD_BYTES))
    return taken.digest()
