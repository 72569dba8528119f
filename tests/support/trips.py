"""Traces which files of the gateway a request visits until its prompt is token ids.

docs/contribute/request-files.md defines the words used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.calls import watched_calls

GATEWAY = f"{Path(__file__).parents[2]}/gateway/"
LAST = "text/tokenizer.py"
ASIDES = {
    "service.py": "which model is served, and whether the engine may be asked now",
    "model_host.py": "the same, for one model",
    "model_preparation.py": "the same",
    "engine/client.py": "the same",
    "engine/refusal_cache.py": "the same",
    "auth/caller.py": "the limits of the caller",
    "generation/timeline.py": "the clock",
    "http/json_values.py": "checks of one JSON value",
    "api/openai/field_paths.py": "the names of fields in errors and headers",
}
"""File that only supplies a fact -> what the fact is about. These files pass no part of the prompt
on."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A call of a function by a function in another file of the gateway."""

    caller: str
    file: str
    function: str


class TripTrace:
    """Records the entries of files inside `with trace():`, in this thread."""

    def __init__(self) -> None:
        self.entries: list[FileEntry] = []

    def __call__(self) -> AbstractContextManager[None]:
        return watched_calls(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        file = _file_of(frame)
        if event != "call" or file is None or _is_attribute(frame):
            return
        caller = frame.f_back
        while caller is not None and _file_of(caller) is None:
            caller = caller.f_back
        source = "" if caller is None else _file_of(caller) or ""
        if source != file:
            self.entries.append(FileEntry(source, file, frame.f_code.co_qualname))

    def trip(self, view: str) -> list[FileEntry]:
        """Return the entries from the first into the file `view` to the next into LAST, without
        those from or into ASIDES."""
        files = [entry.file for entry in self.entries]
        first = files.index(view)
        entries = self.entries[first : files.index(LAST, first) + 1]
        return [each for each in entries if not {each.caller, each.file} & ASIDES.keys()]


def returns(trip: Sequence[FileEntry]) -> list[FileEntry]:
    """Return the entries into a file that was entered before, except if the entry's caller entered
    the same file last."""
    found = []
    last_of: dict[str, str] = {}  # caller -> the file that it has entered last
    seen: set[str] = set()
    for entry in trip:
        if entry.file in seen and last_of.get(entry.caller) != entry.file:
            found.append(entry)
        seen.add(entry.file)
        last_of[entry.caller] = entry.file
    return found


def _file_of(frame: FrameType) -> str | None:
    name = frame.f_code.co_filename
    return name.removeprefix(GATEWAY) if name.startswith(GATEWAY) else None


def _is_attribute(frame: FrameType) -> bool:
    """Return whether the frame computes a property."""
    owner = type(frame.f_locals.get("self"))
    found: Any = getattr(owner, frame.f_code.co_name, None)
    return isinstance(found, property | cached_property)


def files_of(trip: Sequence[FileEntry]) -> list[str]:
    """Return the files of a trip in the order in which they are entered first."""
    return list(dict.fromkeys(entry.file for entry in trip))
