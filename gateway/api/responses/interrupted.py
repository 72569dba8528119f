"""The failed response and last event of a background response whose process died."""

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


def interrupted_response(response_id: str, number: int, body: bytes | None) -> Interruption:
    """Return the end of a response. `body` is the stored response; its output is kept."""
    assert body is not None, "a background response is stored from its start"
    response = msgspec.json.decode(body) | {"status": "failed", "error": _DIED}
    return Interruption(last_frame(number, response), msgspec.json.encode(response))
