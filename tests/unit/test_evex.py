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
    101b:\tjne    1009 <multiply+0x9>
    101d:\tdata16 lea 0x10(%rip),%rdi        # 1034 <SCRATCH>
    1025:\tcall   2000 <add>
"""
EVEX = """
0000000000001000 <multiply>:
    1000:\tvpdpbusd 0x40(%rdi),%ymm1,%ymm2
    1007:\tlea    -0x8347a(%rip),%rdx        # 84488 <TABLE>
    100e:\tvfmadd231ps %ymm3,%ymm2,%ymm4
    1013:\tjne    1007 <multiply+0x7>
    1015:\tdata16 lea 0x18(%rip),%rdi        # 1034 <SCRATCH>
    101d:\tcall   2008 <add>
"""


def test_places_padding_and_encodings_do_not_count() -> None:
    assert first_difference(VEX, EVEX) == ""
    assert len([*instructions(VEX)]) == 6


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ("%ymm3,%ymm2,%ymm4", "%ymm2,%ymm3,%ymm4"),
        ("vfmadd231ps", "vfmadd213ps"),
        ("0x40(%rdi)", "0x60(%rdi)"),
        ("    1013:\tjne    1007 <multiply+0x7>\n", ""),
        ("    1015:\tdata16 lea 0x18(%rip),%rdi        # 1034 <SCRATCH>\n", ""),
    ],
)
def test_any_other_difference_counts(words: str, others: str) -> None:
    assert words in EVEX
    assert first_difference(VEX, EVEX.replace(words, others)) != ""
