"""SentencePiece's tables of normalisation rules: those that would make the gateway's library fail
are refused."""

from __future__ import annotations

import random
import struct

import pytest
from tokenizers import normalizers

from tests.support.gguf_tokenizers import TEXTS, odd_texts
from tests.support.unigram import sentencepiece_model, unigram_metadata
from worker.checkpoint.sentencepiece_rules import BLOCK, charsmap_error


@pytest.fixture(scope="module")
def table() -> bytes:
    return bytes(unigram_metadata(sentencepiece_model())["precompiled_charsmap"])


def normalize(table: bytes, texts: list[str]) -> list[str]:
    step = normalizers.Precompiled(table)
    return [step.normalize_str(text) for text in texts]


def test_a_table_of_sentencepiece_is_whole(table: bytes) -> None:
    assert charsmap_error(table) is None
    assert normalize(table, ["\ufb01n \u2460\t\uff21"]) == ["fin 1 A"]


def test_a_table_that_is_accepted_normalises_every_text(table: bytes) -> None:
    """Any number of the trie is replaced. Most of the results are refused, and the others must not
    make the library panic."""
    dice, accepted = random.Random(1), 0
    (size,) = struct.unpack_from("<I", table)
    texts = [*TEXTS, *odd_texts(20), "".join(map(chr, range(0x20, 0x2FF)))]
    for _ in range(40):
        damaged = bytearray(table)
        place = 4 + 4 * dice.randrange(min(size // 4, 600))
        struct.pack_into("<I", damaged, place, dice.getrandbits(dice.choice((12, 20, 26, 32))))
        if charsmap_error(bytes(damaged)) is None:
            accepted += 1
            normalize(bytes(damaged), texts)
    assert 0 < accepted < 40


def trie(root: int, *, replacements: bytes = b"a\0") -> bytes:
    return struct.pack("<I", 4 * BLOCK) + struct.pack("<256I", root, *[0] * 255) + replacements


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"", "too short"),
        (b"\0\0\0\0abc", "0 bytes are no size of a trie"),
        (struct.pack("<I", 1 << 31), "are no size of a trie"),
        (struct.pack("<I", 8) + bytes(8), "8 bytes are no size of a trie"),
        (trie(1 << 18), "unit 0 of its trie points outside of the trie"),
        (trie(1 << 8 | 1 << 10, replacements=b""), "unit 0 of its trie points to no replacement"),
        (trie(0, replacements=b"\xff"), "not UTF-8"),
    ],
)
def test_a_damaged_table_is_refused(table: bytes, message: str) -> None:
    assert message in (charsmap_error(table) or "")


def test_a_replacement_cannot_start_inside_a_character() -> None:
    units = [1 << 8 | 1 << 10, 1 << 31 | 1, *[0] * 254]
    table = struct.pack("<I", 4 * BLOCK) + struct.pack("<256I", *units) + "é\0".encode()
    assert charsmap_error(table) == "unit 0 of its trie points to no replacement"
