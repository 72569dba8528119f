"""An incremental parser of server-sent events, as OpenAI's streams use them."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"
"""The data of the last event."""


class EventReader:
    """Extracts the data of each event from the bytes of a stream. Other fields of events are
    ignored."""

    def __init__(self) -> None:
        self._held = b""
        self._data: list[bytes] = []

    def push(self, body: bytes) -> Iterator[bytes]:
        """Parse the next bytes, which may end anywhere. Yield the data of each completed event."""
        *lines, self._held = (self._held + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif self._data and not line.strip():
                yield b"\n".join(self._data)
                self._data.clear()
