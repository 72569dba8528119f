"""The context of one HTTP request: its id, caller, timeline and record."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gateway.auth.caller import ANONYMOUS, Caller, CallerHeaders
from gateway.generation.group import ChoiceGroup
from gateway.generation.record import RequestRecord, record_of
from gateway.generation.timeline import Timeline, TimelineMoment

REQUEST_ID_HEADER = "x-request-id"
_EMPTY: Mapping[str, Any] = MappingProxyType({})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id_from(header: str) -> str:
    """Return the id that the client sent in `header`, if it is safe in headers and logs. Otherwise
    return a new random id."""
    return header if header and _REQUEST_ID.fullmatch(header) else uuid.uuid4().hex


class RequestContext:
    """One HTTP request, from its headers to its end. Views pass it to the functions they call.

    route     the matched rule, such as "/v1/models/<name>"
    is_probe  whether the request is a health check or a scrape
    on_close  functions that are called with the request's record when the request has ended
    """

    def __init__(
        self,
        *,
        method: str,
        path: str,
        route: str,
        headers: CallerHeaders = _EMPTY,
        environ: Mapping[str, Any] = _EMPTY,
        is_probe: bool = False,
        on_close: Sequence[Callable[[RequestRecord], None]] = (),
    ) -> None:
        #: The id in the log and in the response. The token endpoint replaces it with the body's
        #: `request_id`, if there is one.
        self.request_id = request_id_from(headers.get(REQUEST_ID_HEADER, ""))
        #: The sender of the request; ANONYMOUS until the gate has admitted the request.
        self.caller: Caller = ANONYMOUS
        self.headers = headers
        #: The WSGI environment. It holds the client's socket.
        self.environ = environ
        self.timeline = Timeline()
        #: Main name of the model that the request uses; "" if it uses none or its name is unknown.
        self.model = ""
        #: Fields of the body that had no effect. They are listed in a header and in the response.
        self.ignored: list[str] = []
        #: The choices of an inference request that were sent last; None for other requests.
        self.group: ChoiceGroup | None = None
        #: Whether this context is closed at the end of a stream or of a detached generation. If
        #: not, it is closed when the view returns.
        self.is_streaming = False
        #: Whether the request belongs to a batch, so that others are served before it.
        self.is_background = False
        self._method, self._path, self._route = method, path, route
        self._is_probe = is_probe
        self._on_close = list(on_close)
        #: Whether the request has ended.
        self.is_closed = False

    def extensions(self, effective: Any = None) -> dict[str, Any]:
        """Return the response members that no other server's API defines. Members without a value
        are left out.

        effective  the response's `effective` member, if it is requested; otherwise None
        """
        members = {"ignored_params": self.ignored or None, "effective": effective}
        return {name: value for name, value in members.items() if value is not None}

    def call_on_close(self, listener: Callable[[RequestRecord], None]) -> None:
        """Call `listener` with the request's record when the request has ended."""
        self._on_close.append(listener)

    def close(self, status: int) -> None:
        """Record the end of the request, with its HTTP status. Later calls have no effect."""
        if self.is_closed:
            return
        self.is_closed = True
        self.timeline.note(TimelineMoment.ENDED)
        record = record_of(
            self.timeline,
            self.group,
            request_id=self.request_id,
            method=self._method,
            path=self._path,
            route=self._route,
            status=status,
            key=self.caller.name,
            model=self.model,
            is_probe=self._is_probe,
        )
        for listener in self._on_close:
            listener(record)
