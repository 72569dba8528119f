"""Ports for programs under test: no two processes of tests use the same ones."""

from __future__ import annotations

from tests.support.ports import BLOCK, free_port
from tests.support.processes import Program

ONE_BLOCK = f"""
from tests.support import ports
ports.BLOCKS = range(11_000, 11_000 + {BLOCK}, {BLOCK})
print(ports.free_port(), flush=True)
input()
"""


def test_a_block_of_ports_belongs_to_one_process_until_it_ends():
    with Program(["-c", ONE_BLOCK], has_stdin=True) as first:
        first.line_with("11")
        with Program(["-c", ONE_BLOCK]) as second:
            assert second.end() == 1
            assert "have reserved all ports" in second.err[-1]
    with Program(["-c", ONE_BLOCK], has_stdin=True) as third:
        third.line_with("11")


def test_adjacent_ports_are_given_once():
    pairs = [free_port(adjacent=2) for _ in range(3)]
    assert len({port for first in pairs for port in (first, first + 1)} | {free_port()}) == 7
