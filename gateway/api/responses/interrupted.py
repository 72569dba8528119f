"""What is said of a response whose process died: it failed, and this is its last event."""

from __future__ import annotations

import msgspec

from gateway.api.responses.events import last_frame
from gateway.store.queries import Interruption

_DIED = {
    "code": "server_error",
    "message": "the server process that generated this response ended before it was complete",
    "param": None,
    "type": "engine_lost",
}


def response_epitaph(response_id: str, number: int, body: bytes | None) -> Interruption:
    """`body` is the response as it was kept; its output is what it had then."""
    assert body is not None, "a response made in the background is kept from its beginning"
    response = msgspec.json.decode(body) | {"status": "failed", "error": _DIED}
    return Interruption(last_frame(number, response), msgspec.json.encode(response))
