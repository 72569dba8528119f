"""The bytes of each token, computed by a tokenizer's decoder.

The decoder of a tokenizer is a list of steps that convert token strings to text. Most decoders
convert each token to bytes independently of the others. Some also strip blanks from the start of
the whole text. `ByteCodec` is such a decoder, made once from its JSON description. It allows
incremental decoding, because the bytes of successive tokens only have to be joined. For any other
decoder `codec_of` returns None, and the caller must use the library `tokenizers`.

One result differs from that of `tokenizers`. Some vocabularies have tokens for single bytes
(`<0xE2>`). If a run of such tokens is not UTF-8 as a whole, `tokenizers` replaces every byte of the
run with U+FFFD, even those of valid characters. A stream cannot wait for the end of a run. So here
valid characters stay, and only invalid bytes become U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Piece = str | bytes
"""A token during decoding: text, until a step converts it to bytes."""
Step = Callable[[Piece], Piece]
"""One step of a decoder, applied to one token."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ByteCodec:
    """Decodes each token to bytes, independently of the other tokens. Only the first token of a
    text has rules of its own."""

    #: Functions applied in turn to every token except the first one of a text.
    steps: tuple[Step, ...]
    #: Functions applied in turn to the first token of a text.
    first_steps: tuple[Step, ...]
    #: The character that is stripped from the start of a text; "": none.
    strip: str = ""
    #: Maximum number of characters that are stripped.
    strip_max: int = 0

    def token(self, text: str) -> bytes:
        """Return the bytes of a token that is not the first one of a text."""
        return _run(self.steps, text)

    def first_token(self, text: str) -> bytes:
        """Return the bytes of the first token of a text."""
        return _run(self.first_steps, text)


def _run(steps: tuple[Step, ...], text: str) -> bytes:
    piece: Piece = text
    for step in steps:
        piece = step(piece)
    return piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace")


def codec_of(decoder: Mapping[str, Any] | None) -> ByteCodec | None:
    """Return the codec for a decoder's JSON description. The result is None if there is no decoder,
    or if it does not convert each token independently of the others."""
    steps: list[Step] = []
    first_steps: list[Step] = []
    rest = _flattened(decoder) if decoder else None
    if not rest:
        return None
    while rest:
        description = rest.pop(0)
        if description["type"] in ("Fuse", "ByteLevel"):
            if description["type"] == "ByteLevel":
                steps.append(_byte_level)
                first_steps.append(_byte_level)
            return _with_strip(steps, first_steps, rest)
        made = _step_of(description)
        if made is None:
            return None
        steps.append(made[0])
        first_steps.append(made[1])
    return ByteCodec(tuple(steps), tuple(first_steps))


def _flattened(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the steps of a decoder, without nested sequences."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [inner for outer in decoder["decoders"] for inner in _flattened(outer)]


def _with_strip(
    steps: Sequence[Step], first_steps: Sequence[Step], rest: Sequence[Mapping[str, Any]]
) -> ByteCodec | None:
    """Return the codec, given the steps `rest` that are applied to the whole text.

    Only one of these steps can be applied incrementally: a single strip at the start of the text.
    `Fuse` has no effect here. If `rest` contains any other step, the result is None.
    """
    strip, strip_max = "", 0
    for description in rest:
        if description["type"] == "Fuse":
            continue
        if description["type"] != "Strip" or description["stop"] or strip:
            return None
        strip, strip_max = description["content"], description["start"]
    return ByteCodec(tuple(steps), tuple(first_steps), strip, strip_max)


def _step_of(description: Mapping[str, Any]) -> tuple[Step, Step] | None:
    """Return (step for every token but the first, step for the first token); None if the step is
    not supported.

    description  JSON description of one step of a decoder
    """
    match description:
        case {"type": "ByteFallback"}:
            return _byte_fallback, _byte_fallback
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            replace = _replacing(old, new)
            return replace, replace
        case {"type": "Metaspace", "replacement": str(blank)}:
            return _replacing(blank, " "), _replacing(blank, "" if _prepends(description) else " ")
    return None


def _prepends(metaspace: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer puts a blank before the first word of a text. `add_prefix_space`
    is an older name of the setting."""
    scheme = metaspace.get("prepend_scheme")
    if scheme is None:
        return bool(metaspace.get("add_prefix_space", True))
    return bool(scheme != "never")


def _replacing(old: str, new: str) -> Step:
    """Return a step that replaces a string in text tokens."""

    def replace(piece: Piece) -> Piece:
        return piece.replace(old, new) if isinstance(piece, str) else piece

    return replace


def _byte_fallback(piece: Piece) -> Piece:
    """Decode a token such as `<0xE2>` to its byte. Leave other tokens unchanged."""
    found = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes.fromhex(found[1]) if found else piece


def _byte_level_alphabet() -> dict[int, int]:
    """Return the table code point -> byte of GPT-2's spelling of bytes, for `str.translate`.

    A printable byte is spelled as the character with the same code. The other 68 bytes are spelled
    as U+0100, U+0101 and so on. All other characters below U+0100 are mapped to a code point that
    latin-1 cannot encode, so encoding them fails.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    beyond = 0x10FFFF
    return {byte: beyond for byte in others} | {0x100 + i: byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(piece: Piece) -> Piece:
    """Decode GPT-2's spelling of bytes as characters. A token with any other character is plain
    text, which is encoded as UTF-8."""
    if isinstance(piece, bytes):
        return piece
    try:
        return piece.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode("utf-8", "replace")
