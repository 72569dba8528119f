"""How many random examples a test draws: few in `make test`, more in `make torture`."""

from __future__ import annotations

import os
from typing import TypeVar

VARIABLE, MORE = "TIDEGATE_TEST_EXAMPLES", "more"
"""Environment variable of the test process, and its value for more examples. The program
tests/torture/examples.py sets the variable."""


_Choice = TypeVar("_Choice")


def examples(few: _Choice, more: _Choice) -> _Choice:
    """Return `more` if the environment selects more examples, else `few`."""
    return more if os.environ.get(VARIABLE) == MORE else few
