"""The bytes of each token id, from a tokenizer's decoder.

A tokenizer's decoder is a small program over a list of token strings. Decoders in use map each
token to bytes on its own, and at most strip blanks from the start of the whole text. `ByteCodec` is
such a program, compiled once from its JSON description; it allows incremental decoding by joining
bytes. For any other decoder the result is None, and the caller must use `tokenizers`.

If a tokenizer spells characters as single bytes (`<0xE2>`), `tokenizers` replaces every byte of a
run by U+FFFD if the run as a whole is not UTF-8, including its valid characters. A stream cannot
wait for the end of a run, so here valid characters stay and only invalid bytes become U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Piece = str | bytes
"""A token being decoded: text until a step turns it into bytes."""
Step = Callable[[Piece], Piece]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ByteCodec:
    """Decodes each token to bytes on its own.

    steps        functions applied in turn to every token except the first one of a text
    first_steps  functions applied in turn to the first token of a text
    strip        the character to strip from the start of a text, at most `strip_max` times
    """

    steps: tuple[Step, ...]
    first_steps: tuple[Step, ...]
    strip: str = ""
    strip_max: int = 0

    def token(self, text: str) -> bytes:
        return _run(self.steps, text)

    def first_token(self, text: str) -> bytes:
        return _run(self.first_steps, text)


def _run(steps: tuple[Step, ...], text: str) -> bytes:
    piece: Piece = text
    for step in steps:
        piece = step(piece)
    return piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace")


def codec_of(decoder: Mapping[str, Any] | None) -> ByteCodec | None:
    """Return the codec for a decoder's JSON, or None if the decoder does not map each token to
    bytes.
    """
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
    if decoder["type"] != "Sequence":
        return [decoder]
    return [inner for outer in decoder["decoders"] for inner in _flattened(outer)]


def _with_strip(
    steps: Sequence[Step], first_steps: Sequence[Step], rest: Sequence[Mapping[str, Any]]
) -> ByteCodec | None:
    """Add a strip after the tokens are fused. Only one at the start is possible without the end."""
    strip, strip_max = "", 0
    for description in rest:
        if description["type"] == "Fuse":
            continue
        if description["type"] != "Strip" or description["stop"] or strip:
            return None
        strip, strip_max = description["content"], description["start"]
    return ByteCodec(tuple(steps), tuple(first_steps), strip, strip_max)


def _step_of(description: Mapping[str, Any]) -> tuple[Step, Step] | None:
    """Return one per-token decoder as (step for any token, step for the first token)."""
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
    """Return whether a blank is put before the first word; `add_prefix_space` is the older
    spelling.
    """
    scheme = metaspace.get("prepend_scheme")
    if scheme is None:
        return bool(metaspace.get("add_prefix_space", True))
    return bool(scheme != "never")


def _replacing(old: str, new: str) -> Step:
    def replace(piece: Piece) -> Piece:
        return piece.replace(old, new) if isinstance(piece, str) else piece

    return replace


def _byte_fallback(piece: Piece) -> Piece:
    found = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes.fromhex(found[1]) if found else piece


def _byte_level_alphabet() -> dict[int, int]:
    """Return code point -> byte, for `str.translate`.

    Printable bytes stand for themselves, the other 68 for U+0100 and on. A character outside the
    alphabet maps beyond latin-1, so encoding fails.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    beyond = 0x10FFFF
    return {byte: beyond for byte in others} | {0x100 + i: byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(piece: Piece) -> Piece:
    """Decode GPT-2's spelling of bytes as letters. A token with any other letter is plain text."""
    if isinstance(piece, bytes):
        return piece
    try:
        return piece.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode("utf-8", "replace")
