"""The comparison of two disassemblies, of which only one instruction may differ in its encoding."""

from __future__ import annotations

import pytest

from tests.torture.evex import first_difference, instructions

VEX = """
0000000000001000 <multiply>:
    1000:\t{vex} vpdpbusd 0x40(%rdi),%ymm1,%ymm2
    1009:\tlea    0x834ea(%rip),%rdx        # 844fa <TABLE>
    1010:\tnopw   0x0(%rax,%rax,1)
    1016:\tvfmadd231ps %ymm3,%ymm2,%ymm4
    101b:\tjne    1000 <multiply>
"""
EVEX = """
0000000000001000 <multiply>:
    1000:\tvpdpbusd 0x40(%rdi),%ymm1,%ymm2
    1007:\tlea    -0x8347a(%rip),%rdx        # 84488 <TABLE>
    100e:\tvfmadd231ps %ymm3,%ymm2,%ymm4
    1013:\tjne    1000 <multiply>
"""


def test_places_padding_and_encodings_do_not_count() -> None:
    assert first_difference(VEX, EVEX) == ""
    assert len([*instructions(VEX)]) == 4


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ("%ymm3,%ymm2,%ymm4", "%ymm2,%ymm3,%ymm4"),
        ("vfmadd231ps", "vfmadd213ps"),
        ("0x40(%rdi)", "0x60(%rdi)"),
        ("    1013:\tjne    1000 <multiply>\n", ""),
    ],
)
def test_any_other_difference_counts(words: str, others: str) -> None:
    assert words in EVEX
    assert first_difference(VEX, EVEX.replace(words, others)) != ""
