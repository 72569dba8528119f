"""The ids of requests: which of them a text stands for."""

from __future__ import annotations

import re

import pytest

from protocol.shared.request_ids import (
    MIN_BEGINNING_CHARS,
    PREFIXES,
    bare_id,
    begins,
    choose,
    matches,
)
from tests.support.docs_blocks import ROOT

FULL = "7f3a9c04d1"
KNOWN = [f"chatcmpl-{FULL}", "cmpl-7f3b000000", "hello-1", "hello-10", "one-two-three"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"chatcmpl-{FULL}", [f"chatcmpl-{FULL}"]),
        (FULL, [f"chatcmpl-{FULL}"]),
        ("chatcmpl-7f3a", [f"chatcmpl-{FULL}"]),
        ("7f3a", [f"chatcmpl-{FULL}"]),
        ("chatcmpl-7f3a9…", [f"chatcmpl-{FULL}"]),
        ("cmpl-7f3b", ["cmpl-7f3b000000"]),
        ("7f3", []),  # too short
        ("chatcmpl-7f3", []),
        ("chatcmpl-", []),
        ("", []),
        ("hello-1", ["hello-1"]),  # equal, although another begins with it
        ("hello-", ["hello-1", "hello-10"]),
        ("chatcmpl-hello-1", ["hello-1"]),
        ("1", []),
        ("two-three", []),  # a client's own id has no prefix
        ("a04d1", []),
    ],
)
def test_a_text_stands_for_equal_ids_or_else_for_those_that_begin_with_it(
    text: str, found: list[str]
) -> None:
    assert choose(KNOWN, text) == found


@pytest.mark.parametrize("prefix", PREFIXES)
def test_only_the_prefixes_of_apis_are_removed(prefix: str) -> None:
    assert bare_id(prefix + FULL) == FULL
    assert matches(prefix + FULL, FULL)
    assert matches(FULL, prefix + FULL)
    assert begins(prefix + FULL, FULL[:MIN_BEGINNING_CHARS])


def test_the_gateway_makes_no_id_with_another_prefix() -> None:
    """Each prefix of an id is written in a string beside the id of the request."""
    sources = [path.read_text() for path in (ROOT / "gateway").rglob("*.py")]
    found = {
        prefix
        for source in sources
        for prefix in re.findall(r'f"([a-z-]+[-_])\{(?:self\.|context\.)?request_id\}"', source)
    }
    assert {"msg_", "ollama-", "infill-"} <= found
    assert found <= set(PREFIXES)
