"""Answers `Expect: 100-continue` when the application first reads the body.

gunicorn answers it before the application has seen the request. Then a client sends its whole body
even if its key is wrong, its path unknown or its body too long. Without "100 Continue" the client
gets the refusal alone, and keeps the body.

This depends on private details of gunicorn: `_expected_100_continue` and `must_close` of a request,
and `reader` of its body. setup.py allows only versions that have them (`tests/oldest.py`).
"""

from __future__ import annotations

from typing import Any

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def await_body(req: Any, sock: Any) -> None:
    """Have the first read of the request's body send "100 Continue", if its client waits for that.

    If the body is never read, the connection is closed after the response: the client may or may
    not send the body, so the start of its next request is unknown.
    """
    if req._expected_100_continue:
        req._expected_100_continue = False
        req.must_close = True
        req.body.reader = _AwaitedReader(req.body.reader, req, sock)


class _AwaitedReader:
    """Reads a body whose client waits for "100 Continue". It replaces itself at the first read."""

    def __init__(self, reader: Any, req: Any, sock: Any) -> None:
        self._reader, self._req, self._socket = reader, req, sock

    def read(self, size: int) -> bytes:
        """Send "100 Continue" to the client, and read its body. Raises OSError if it has gone."""
        self._socket.sendall(CONTINUE)
        self._req.must_close = False
        self._req.body.reader = self._reader
        data: bytes = self._reader.read(size)
        return data
