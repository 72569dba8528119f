"""The base class of all configs, the function `about`, and fields that several configs share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.process.log_lines import LogStyle

PathKind = Literal["", "file", "directory", "new file", "new directory"]
"""What is at a path: a file or a directory to read, or one to write, which may not exist yet."""


def about(
    description: str,
    *,
    wiring: bool = False,
    alias: str = "",
    metavar: str = "",
    path: PathKind = "",
    secret: bool = False,
    **bounds: Any,
) -> Meta:
    """Return the metadata of a config field: its help text and its bounds.

    wiring   the field connects processes: code sets it, and there is no command-line option for it
    alias    a second, shorter option for the field; "": none
    metavar  name of the value in the usage, such as KEY; "": it follows from the type, the unit or
             the description (`tools.flags`)
    path     "file" or similar if the value is a path: the kind of thing there; "": not a path
    secret   the value is not printed
    bounds   arguments of `msgspec.Meta`, such as `ge` and `le`
    """
    extra = {"wiring": wiring, "alias": alias, "metavar": metavar, "path": path, "secret": secret}
    return Meta(description=description, extra=extra, **bounds)


@dataclass(frozen=True, slots=True)
class DeviceDefault:
    """Default of a number that depends on the device. Its field has the default 0, which stands for
    this value, because only the worker can see the device."""

    cpu: int
    gpu: int

    def __str__(self) -> str:
        """Return the defaults of a CPU and of a GPU as text, for `--help`."""
        return f"automatic ({self.cpu:,} on a CPU, {self.gpu:,} on a GPU)"

    def choose(self, wanted: int, *, is_gpu: bool) -> int:
        """Return `wanted`, or if it is 0 the default for the device."""
        return wanted or (self.gpu if is_gpu else self.cpu)


NO_PATH = "none"
"""The value of an option for a path that says that nothing is read or stored there."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configs. Decoding an unknown field raises an error that names the field."""

    def _make_absolute(self, *fields: str) -> None:
        """Make the paths in `fields` absolute. Only `__post_init__` may call this.

        The process that opens the paths may have another working directory than the user's shell.
        """
        for field in fields:
            if (path := getattr(self, field)) not in ("", NO_PATH):
                msgspec.structs.force_setattr(self, field, os.path.abspath(path))


KeyFile = Annotated[
    str, about("file with the cluster key, made by `tidegate cluster-key FILE`", path="file")
]
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
"""What to do if K/V cannot be fetched: compute it again, or end the request with an error."""
