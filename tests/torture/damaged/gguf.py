"""Splits a GGUF file into parts, damages its header, and joins the parts again."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.torture.damaged.damage import NUMBERS, ODD
from worker.checkpoint.gguf_file import GGUFFile

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, FLOAT64 = 4, 5, 6, 7, 8, 9, 10, 12
ALIGNMENT = 32


@dataclass
class GGUFParts:
    """The header of a GGUF file, as lists that may be changed, and its data.

    pairs     [key, value]
    tensors   [name, dimensions in the file's order, type, offset in the data]
    """

    pairs: list[list[Any]]
    tensors: list[list[Any]]
    data: bytes

    @classmethod
    def from_file(cls, file: GGUFFile) -> GGUFParts:
        start = min(info.offset for info in file.tensors.values())
        tensors = [
            [name, list(reversed(info.shape)), int(info.kind), info.offset - start]
            for name, info in file.tensors.items()
        ]
        pairs = [[key, value] for key, value in file.metadata.items()]
        return cls(pairs, tensors, file.path.read_bytes()[start:])

    def damage(self, random: Random) -> None:
        """Change one entry of the metadata or of the table of tensors."""
        pair, tensor = random.choice(self.pairs), random.choice(self.tensors)
        match random.randrange(8):
            case 0 | 1 | 2:
                pair[1] = random.choice(ODD)
            case 3:
                self.pairs.append([pair[0], random.choice(ODD)])
            case 4:
                self.pairs.remove(pair)
            case 5:
                tensor[1] = [random.choice(NUMBERS) for _ in range(random.choice((1, 2, 4, 9)))]
            case 6:
                tensor[random.choice((2, 3))] = random.choice(NUMBERS)
            case _:
                tensor[0] = random.choice((self.tensors[0][0], "", "\x00", "x" * 10_000))

    def to_bytes(self) -> bytes:
        head = struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.pairs))
        head += b"".join(_string(str(key)) + _value(value) for key, value in self.pairs)
        for name, shape, kind, offset in self.tensors:
            head += _string(name) + struct.pack("<I", len(shape))
            head += b"".join(struct.pack("<Q", size) for size in shape)
            head += struct.pack("<IQ", kind & 0xFFFFFFFF, offset)
        return head + bytes(-len(head) % ALIGNMENT) + self.data


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Encode a value as GGUF metadata: its type, then the value. Objects and None become the string
    "{}". A list that is neither all int nor all float becomes an array of strings."""
    match value:
        case bool():
            return struct.pack("<IB", BOOL, value)
        case int():
            return struct.pack("<IQ", UINT64, value & NUMBERS[-1])
        case float():
            return struct.pack("<Id", FLOAT64, value)
        case list():
            return struct.pack("<I", ARRAY) + _array(value)
        case _:
            return struct.pack("<I", STRING) + _string(value if isinstance(value, str) else "{}")


def _array(values: list[Any]) -> bytes:
    for kind, types, form in ((INT32, int, "i"), (FLOAT32, float, "f")):
        if values and all(type(value) is types for value in values):
            return struct.pack(f"<IQ{len(values)}{form}", kind, len(values), *values)
    strings = b"".join(_string(str(value)) for value in values)
    return struct.pack("<IQ", STRING, len(values)) + strings
