"""The context of one HTTP request: its id, timeline and listeners."""

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
from gateway.observe.metrics import Metrics

REQUEST_ID_HEADER = "x-request-id"
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id_from(header: str) -> str:
    """Return the client's own id if it is safe in headers and logs; otherwise a new one."""
    return header if header and _REQUEST_ID.fullmatch(header) else uuid.uuid4().hex


class RequestContext:
    """One HTTP request, from its headers to its end. Views pass it on to all that they call.

    route     the rule that matched ("/v1/models/<name>"), so that label values are few
    is_probe  see RequestRecord
    on_close  called with the record after the end, as are the metrics
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        method: str,
        path: str,
        route: str,
        headers: CallerHeaders = _NOTHING,
        environ: Mapping[str, Any] = _NOTHING,
        is_probe: bool = False,
        on_close: Sequence[Callable[[RequestRecord], None]] = (),
    ) -> None:
        #: As logged, and as part of the response's id. The token endpoint may replace it by its own
        #: field.
        self.request_id = request_id_from(headers.get(REQUEST_ID_HEADER, ""))
        #: Who sent it; set after the gate has admitted it.
        self.caller: Caller = ANONYMOUS
        self.headers = headers
        #: WSGI's environment, by which a disconnected client is noticed.
        self.environ = environ
        self.timeline = Timeline()
        #: Fields of the body that had no effect, for a header and the response.
        self.ignored: list[str] = []
        #: The choices of an inference request.
        self.group: ChoiceGroup | None = None
        #: Whether a stream closes this context when it ends.
        self.is_streaming = False
        self._metrics = metrics
        self._method, self._path, self._route = method, path, route
        self._is_probe = is_probe
        self._on_close = on_close
        self._is_closed = False

    def start(self, group: ChoiceGroup) -> None:
        """Note that this is an inference request with these choices."""
        self.group = group
        self._metrics.open_answers.inc()

    def extensions(self, effective: Any = None) -> dict[str, Any]:
        """Return our own members of a response. `effective` is None if it was not requested."""
        members = {"ignored_params": self.ignored or None, "effective": effective}
        return {name: value for name, value in members.items() if value is not None}

    def close(self, status: int) -> None:
        """Record the end of the request. Later calls have no effect."""
        if self._is_closed:
            return
        self._is_closed = True
        self.timeline.note(TimelineMoment.ENDED)
        if self.group is not None:
            self._metrics.open_answers.dec()
        record = record_of(
            self.timeline,
            self.group,
            request_id=self.request_id,
            method=self._method,
            path=self._path,
            route=self._route,
            status=status,
            key=self.caller.name,
            is_probe=self._is_probe,
        )
        self._metrics.count(record)
        for listener in self._on_close:
            listener(record)
