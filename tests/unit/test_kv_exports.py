"""Leases: who may read what, until when, and when all have been there."""

from __future__ import annotations

import numpy as np
import pytest

from worker.kv.transfer.exports import EndedLease, Exports

LEASE, ONE, TWO = b"lease", b"one", b"two"
RIGHT, WRONG = EndedLease(is_live=True, is_taken=False), EndedLease(is_live=False, is_taken=False)
LAST = EndedLease(is_live=True, is_taken=True)


def exported(num_readers: int = 1) -> Exports:
    exports = Exports()
    exports.add(LEASE, np.array([7, 3, 9, 4]), num_readers)
    return exports


def test_a_reader_is_told_the_blocks_it_asked_for_in_their_order():
    exports = exported()
    blocks, opened = exports.open(LEASE, ONE, 1, 2), exports.opened(LEASE, ONE)
    assert blocks is not None
    assert opened is not None
    assert blocks.tolist() == opened.tolist() == [3, 9]
    assert exports.opened(LEASE, TWO) is None


@pytest.mark.parametrize(("first", "count"), [(0, 5), (4, 1), (-1, 2), (0, 0), (2, -1)])
def test_blocks_that_a_lease_has_not_are_refused_and_nothing_is_opened(first, count):
    exports = exported()
    with pytest.raises(ValueError, match="a lease with 4"):
        exports.open(LEASE, ONE, first, count)
    assert exports.opened(LEASE, ONE) is None


def test_a_lease_is_taken_when_its_last_reader_has_done():
    exports = exported(num_readers=2)
    exports.open(LEASE, ONE, 0, 4)
    exports.open(LEASE, TWO, 2, 1)
    assert exports.on_reader_done(LEASE, ONE) == RIGHT
    assert exports.on_reader_done(LEASE, TWO) == LAST


def test_to_be_done_twice_is_to_be_done_once():
    exports = exported(num_readers=2)
    exports.open(LEASE, ONE, 0, 4)
    assert [exports.on_reader_done(LEASE, ONE) for _ in range(3)] == [RIGHT, RIGHT, RIGHT]
    exports.open(LEASE, TWO, 0, 4)
    assert [exports.on_reader_done(LEASE, TWO) for _ in range(3)] == [LAST, RIGHT, RIGHT]


def test_a_reader_that_never_opened_has_read_nothing_right_but_will_not_come_again():
    assert exported().on_reader_done(LEASE, ONE) == EndedLease(is_live=False, is_taken=True)


def test_a_lease_that_was_never_there_is_over():
    exports = Exports()
    assert exports.open(LEASE, ONE, 0, 1) is None
    assert exports.opened(LEASE, ONE) is None
    assert exports.on_reader_done(LEASE, ONE) == WRONG
    exports.withdraw(LEASE)


def test_one_that_is_withdrawn_before_it_is_opened_is_over():
    exports = exported()
    exports.withdraw(LEASE)
    assert exports.open(LEASE, ONE, 0, 1) is None


def test_what_was_read_of_one_that_is_withdrawn_since_is_not_right():
    exports = exported()
    exports.open(LEASE, ONE, 0, 4)
    exports.withdraw(LEASE)
    assert exports.opened(LEASE, ONE) is None
    assert exports.on_reader_done(LEASE, ONE) == WRONG


def test_one_that_is_taken_may_still_be_read_until_it_is_withdrawn():
    exports = exported()
    exports.open(LEASE, ONE, 0, 4)
    assert exports.on_reader_done(LEASE, ONE) == LAST
    exports.open(LEASE, TWO, 0, 4)
    assert exports.on_reader_done(LEASE, TWO) == RIGHT


def test_a_name_is_exported_once():
    exports = exported()
    with pytest.raises(ValueError, match="already exported"):
        exports.add(LEASE, np.array([1]), 1)


def test_it_is_being_read_from_the_first_opening_to_the_last_word():
    exports = exported(num_readers=2)
    assert not exports.is_being_read
    exports.open(LEASE, ONE, 0, 1)
    assert exports.is_being_read
    exports.on_reader_done(LEASE, ONE)
    assert not exports.is_being_read
    exports.open(LEASE, TWO, 0, 1)
    exports.withdraw(LEASE)
    assert not exports.is_being_read
