"""The finish reason, tested against each row of the table in the docstring of `finish_reason`."""

from __future__ import annotations

import itertools
import re

import pytest

from gateway.formats.events import (
    finish_reason,
)

ROWS = re.findall(r"\| ([\w ]+?) +\| (\w+) +\| (\w+) +\| `(\w+)` +\|", finish_reason.__doc__ or "")
ENGINE = ("stop", "length", "abort", "error")


def expected(engine: str, matched: bool, calls: int) -> str:
    for says, stop, completed, reason in ROWS:
        if (
            says in (engine, "anything")
            and (stop == "matched") == matched
            and completed in ("any", "some" if calls else "none")
        ):
            return reason
    raise AssertionError("the table has a hole")


@pytest.mark.parametrize(
    ("engine", "matched", "calls"), [*itertools.product(ENGINE, (False, True), (0, 1, 2))]
)
def test_finish_reasons_agree_with_the_table(engine: str, matched: bool, calls: int) -> None:
    reason = finish_reason(engine, stop_matched=matched, completed_calls=calls)  # type: ignore[arg-type]
    assert reason == expected(engine, matched, calls)


def test_completed_calls_do_not_hide_that_the_rest_was_cut_off() -> None:
    assert finish_reason("length", completed_calls=3) == "length"


def test_an_answer_that_goes_on_has_no_reason() -> None:
    assert finish_reason(None, stop_matched=True) == "stop"
    with pytest.raises(ValueError, match="unfinished"):
        finish_reason(None)
