"""Sends the lines of a batch to a server, over a connection that stays open between lines."""

from __future__ import annotations

import http.client
import uuid

from protocol.shared.batch_retries import LineOutcome
from protocol.shared.batches import BatchLine, BatchResponse, json_of
from tools.http.web import WebServer, hang_up

CONNECT_TIMEOUT_S = 10.0
REQUEST_ID_HEADER = "x-request-id"


class LineSender:
    """A connection to the server, which one thread uses.

    timeout_s  longest time to wait for an answer
    """

    def __init__(self, server: WebServer, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def send(self, line: BatchLine) -> LineOutcome:
        """Send a line of the batch, and return its outcome. If the server has closed the idle
        connection, connect and send again."""
        was_used = self._connection is not None
        outcome = self._send(line)
        if was_used and outcome.response is None:
            # The server probably closed the idle connection before the request arrived.
            outcome = self._send(line)
        return outcome

    def _send(self, line: BatchLine) -> LineOutcome:
        was_sent = False
        try:
            connection = self._connected()
            was_sent = True
            answer = self._server.post_json(connection, line.url, bytes(line.body))
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return LineOutcome(was_sent=was_sent, message=f"{type(error).__name__}: {error}")
        if answer.will_close:
            self.close()
        request_id = answer.getheader(REQUEST_ID_HEADER) or uuid.uuid4().hex
        response = BatchResponse(answer.status, request_id, json_of(data))
        return LineOutcome(response, _seconds(answer.getheader("Retry-After")))

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            connection = self._server.connect(CONNECT_TIMEOUT_S)
            connection.connect()
            connection.sock.settimeout(self._timeout_s)
            self._connection = connection
        return self._connection

    def hang_up(self) -> None:
        """End the connection while another thread waits for its answer."""
        if (connection := self._connection) is not None:
            hang_up(connection)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _seconds(header: str | None) -> float | None:
    """Return the header Retry-After in seconds; None if it is absent or is a date."""
    is_number = header is not None and header.isascii() and header.isdigit()
    return float(header) if header is not None and is_number else None
