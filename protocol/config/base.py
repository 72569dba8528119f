"""The base of all configs, the function that describes a field, and fields that configs share."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.log_lines import LogStyle


def about(description: str, *, wiring: bool = False, **bounds: Any) -> Meta:
    """Return the metadata of a config field: its help text and its bounds.

    A `wiring` field connects processes; it is not a command-line option.
    """
    return Meta(description=description, extra={"wiring": wiring}, **bounds)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configs: immutable and keyword-only. An unknown field raises, with its name."""

    def _make_absolute(self, *fields: str) -> None:
        """Make the paths in `fields` absolute; call it from `__post_init__` only.

        The process that opens them may have another working directory than the user's shell.
        """
        for field in fields:
            if path := getattr(self, field):
                msgspec.structs.force_setattr(self, field, os.path.abspath(path))


SharedKey = Annotated[
    str, about("file that holds the cluster key shared by all engines of one cluster", wiring=True)
]
LogFormat = Annotated[
    LogStyle,
    about(
        "format of the process's log lines; color: text with colours, for a terminal", wiring=True
    ),
]
OnFailure = Literal["recompute", "error"]
"""The action if K/V cannot be fetched: compute it again, or end the request with an error."""
