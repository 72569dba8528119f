"""File format of one block: a header that identifies it, and its bytes.

```
offset  bytes
0       8      "tidegate"
8       4      format version, uint32 LE
12      8      length of the payload, uint64 LE
20      16     layout: digest of model, dtype and shape (worker/kv/layout.py)
36      32     content: the block's chained hash (engine_core/blocks/hash.py)
68      32     SHA-256 of the 68 bytes before and of the payload
100            the payload
```

The reader knows the expected value of every header byte except the digest. So a file that was
truncated, swapped, partly written, or changed in any bit is never used as K/V.
"""

from __future__ import annotations

import struct
from hashlib import sha256

from worker.kv.layout import DIGEST_BYTES as LAYOUT_BYTES

MAGIC = b"tidegate"
VERSION = 1
HASH_BYTES = 32
_FIELDS = struct.Struct(f"<8sIQ{LAYOUT_BYTES}s{HASH_BYTES}s")
HEADER_BYTES = _FIELDS.size + HASH_BYTES

Buffer = bytes | bytearray | memoryview


class DamagedBlockFile(Exception):
    """A stored block differs from what was written; the message gives the difference."""


def header_of(layout: bytes, content: bytes, payload: Buffer) -> bytes:
    """Return the header, [HEADER_BYTES]. Reads the whole payload."""
    fields = _FIELDS.pack(MAGIC, VERSION, len(payload), layout, content)
    return fields + _digest(fields, payload)


def check(header: Buffer, payload: Buffer, layout: bytes, content: bytes) -> None:
    """Raise DamagedBlockFile unless `header` belongs to this payload, layout and content."""
    expected = _FIELDS.pack(MAGIC, VERSION, len(payload), layout, content)
    fields, digest = bytes(header[: _FIELDS.size]), bytes(header[_FIELDS.size :])
    if fields != expected:
        raise DamagedBlockFile("its header is not the one of this block")
    if digest != _digest(expected, payload):
        raise DamagedBlockFile("its checksum does not match its content")


def _digest(fields: bytes, payload: Buffer) -> bytes:
    state = sha256(fields)
    state.update(payload)
    return state.digest()
