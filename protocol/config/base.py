"""How a config's field is described, and the words that several configs share."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.log_lines import LogStyle


def about(description: str, *, wiring: bool = False, **bounds: Any) -> Meta:
    """The one way to describe a field. `wiring` fields connect processes and are no user option."""
    return Meta(description=description, extra={"wiring": wiring}, **bounds)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configs: immutable, keyword-only; a misspelt field is refused by name."""

    def _make_absolute(self, *fields: str) -> None:
        """For `__post_init__`, before anybody has the struct: the process that opens these paths
        does not work where the user typed them."""
        for field in fields:
            if path := getattr(self, field):
                msgspec.structs.force_setattr(self, field, os.path.abspath(path))


SharedKey = Annotated[
    str, about("a file with the key that the engines of one cluster share", wiring=True)
]
LogFormat = Annotated[
    LogStyle, about("of the process's log lines; color: text for a terminal", wiring=True)
]
OnFailure = Literal["recompute", "error"]
"""Of K/V that should have come from elsewhere."""
