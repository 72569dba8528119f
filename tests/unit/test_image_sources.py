"""The bytes of an image in a request: base64 is decoded in pieces, like the whole."""

from __future__ import annotations

import base64
import binascii
import random

import pytest

from gateway.images import source
from gateway.images.source import from_base64

BLANKS = " \t\n\r"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_PIECE_CHARS", 8)


@pytest.mark.parametrize("seed", range(50))
def test_pieces_give_the_bytes_of_the_whole(seed: int) -> None:
    chance = random.Random(seed)
    data = chance.randbytes(chance.randrange(60))
    letters = [*base64.b64encode(data).decode()]
    for _ in range(chance.randrange(9)):
        letters.insert(chance.randrange(len(letters) + 1), chance.choice(BLANKS))
    assert from_base64("".join(letters)) == data


@pytest.mark.parametrize(
    "text",
    ["A", "AAAAA", "AAAAAAA=AAAA", "AAAAAAA=AAAAAAAA", "AAAA!AAAAAAA", "=AAA", "AA=A"],
)
def test_what_is_no_base64_as_a_whole_is_none_in_pieces(text: str) -> None:
    with pytest.raises(binascii.Error):
        base64.b64decode(text, validate=True)
    with pytest.raises(binascii.Error):
        from_base64(text)
