"""The name server of the tests writes the bytes of RFC 1035."""

from __future__ import annotations

import pytest

from tests.support.dns import A, answer_to, question_of

AAAA = 28
NAME = b"\x01a\x07example\x03net\x00"


def query(kind: int) -> bytes:
    """Return the bytes that glibc 2.36 sends for a.example.net, but for the number."""
    return b"\x96\xfd\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + NAME + bytes([0, kind, 0, 1])


def test_a_question_has_a_name_and_a_type() -> None:
    question = question_of(query(A).replace(b"example", b"EXAMPLE"))
    assert (question.name, question.kind) == ("a.example.net", A)


@pytest.mark.parametrize(
    ("kind", "addresses", "head", "records"),
    [
        (
            A,
            ["93.184.216.34", "10.0.0.1"],
            "96fd 8180 0001 0002 0000 0000",
            "c00c 0001 0001 00000000 0004 5db8d822 c00c 0001 0001 00000000 0004 0a000001",
        ),
        (AAAA, ["93.184.216.34"], "96fd 8180 0001 0000 0000 0000", ""),
        (A, None, "96fd 8183 0001 0000 0000 0000", ""),
    ],
    ids=["addresses", "no IPv6 address", "no such name"],
)
def test_an_answer_has_its_bytes(
    kind: int, addresses: list[str] | None, head: str, records: str
) -> None:
    expected = bytes.fromhex(head) + NAME + bytes([0, kind, 0, 1]) + bytes.fromhex(records)
    assert answer_to(query(kind), addresses) == expected
