"""A handle has golden bytes. Without the key, it cannot be read, changed or forged."""

from __future__ import annotations

import base64
import random

import pytest
from msgspec.structs import replace

from engine_core.kv.seal import MAX_CHARS, Seal
from engine_core.requests.kv_handle import Handle
from protocol.wire.errors import InvalidRequest

SECRET = b"secret" * 6
SEAL = Seal(SECRET)
HANDLE = Handle(
    lease=b"l" * 16,
    epoch="e1",
    address="tcp://10.0.0.1:7000",
    num_tokens=29,
    layout=b"d" * 32,
    layout_text="tiny, bfloat16",
    content=b"c" * 32,
)
GOLDEN = (
    "AVfCHbo_h3oqTY2o7Wa0wcrFBSDwqXdEM2M2LgRslplkCj4DfLM4EusL2vkKr4u3qSpylScB69izfmq5"
    "QgEo43gpOtbAUOeF9N7a3DUTV7kj84VQ9YtYn7XITF5-1wLlQ9tHNLi1uH3fvGypaBWJss5AyO4IrGxS"
    "89njT2cdiqyhvyhqFGX53su0CH-M4a33uMQ5I0KdxQngAoQc5sbC"
)


def test_the_text_of_a_handle_is_golden_and_opens_to_the_handle() -> None:
    assert SEAL.to_text(HANDLE) == GOLDEN
    assert SEAL.from_text(GOLDEN) == HANDLE


def test_the_text_of_a_handle_reveals_nothing() -> None:
    """The text hides the fields. Two texts do not show in which field their handles differ."""
    first, second = (
        base64.urlsafe_b64decode(SEAL.to_text(handle) + "==")
        for handle in (HANDLE, replace(HANDLE, lease=b"m" * 16))
    )
    for part in (b"10.0.0.1", HANDLE.lease, HANDLE.epoch.encode(), b"tiny"):
        assert part not in first
    assert sum(a == b for a, b in zip(first[1:], second[1:], strict=True)) < len(first) // 8


def test_a_handle_with_any_changed_bit_is_refused() -> None:
    sealed = base64.urlsafe_b64decode(GOLDEN + "=" * (-len(GOLDEN) % 4))
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidRequest) as refusal:
            SEAL.from_text(base64.urlsafe_b64encode(changed).decode())
        assert refusal.value.param == "kv_transfer_params"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a handle"),
        ("AQ", "not a handle"),
        ("!" * 80, "not a handle"),
        ("A+/=" * 20, "not a handle"),
        ("ä" * 80, "not a handle"),
        ("A" * 80, "version 0"),
        ("AQ" * 40, "not written by an engine of this cluster"),
        ("A" * (MAX_CHARS + 1), "a handle has at most 4,096"),
        (GOLDEN[:-4], "not written by an engine of this cluster"),
        (GOLDEN + "AAAA", "not written by an engine of this cluster"),
    ],
)
def test_a_forged_handle_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refusal:
        SEAL.from_text(text)
    assert "\n" not in refusal.value.message


def test_the_key_of_another_cluster_opens_nothing() -> None:
    with pytest.raises(InvalidRequest, match="of this cluster"):
        Seal(b"another" * 6).from_text(GOLDEN)


def test_random_texts_are_refused_and_nothing_else_is_raised() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        text = base64.urlsafe_b64encode(rng.randbytes(rng.randrange(200))).decode()
        with pytest.raises(InvalidRequest):
            SEAL.from_text(text)
