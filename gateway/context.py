"""The context of one HTTP request: its id, timeline and listeners."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence

from gateway.generation.group import ChoiceGroup
from gateway.generation.record import RequestRecord, record_of
from gateway.generation.timeline import Timeline, TimelineMoment
from gateway.observe.metrics import Metrics

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id_from(header: str | None) -> str:
    """Return the client's own id if it is safe in headers and logs; otherwise a new one."""
    return header if header and _REQUEST_ID.fullmatch(header) else uuid.uuid4().hex


class RequestContext:
    """The state of a request, from its headers to its end. Later calls of `close` have no effect.

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
        request_id: str,
        is_probe: bool = False,
        on_close: Sequence[Callable[[RequestRecord], None]] = (),
    ) -> None:
        self.request_id = request_id
        self.journal = Timeline()
        self.answer: ChoiceGroup | None = None
        self.is_streaming = False
        self.caller = ""  # the name of its key
        self._metrics = metrics
        self._method, self._path, self._route = method, path, route
        self._is_probe = is_probe
        self._on_close = on_close
        self._is_closed = False

    def start(self, answer: ChoiceGroup) -> None:
        """Note that this is an inference request with these choices."""
        self.answer = answer
        self._metrics.open_answers.inc()

    def close(self, status: int) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.journal.note(TimelineMoment.ENDED)
        if self.answer is not None:
            self._metrics.open_answers.dec()
        record = record_of(
            self.journal,
            self.answer,
            request_id=self.request_id,
            method=self._method,
            path=self._path,
            route=self._route,
            status=status,
            key=self.caller,
            is_probe=self._is_probe,
        )
        self._metrics.count(record)
        for listener in self._on_close:
            listener(record)
