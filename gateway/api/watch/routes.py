"""The routes that show what the engines do, and where the time of a request went."""

from __future__ import annotations

from flask import Response

from gateway.api.openai.responses import ErrorAnswer
from gateway.api.watch.responses import TimelineAnswer
from gateway.api.watch.timelines import timeline_answer
from gateway.context import RequestContext
from gateway.http import sse
from gateway.http.client_socket import Outlet
from gateway.http.query import whole_number
from gateway.http.route import READING, Parameter, Routes, Stream, json_response
from gateway.observe.watch import WatchPoller
from gateway.service import Service
from protocol.shared.watch import WatchFrame

routes = Routes("Operators", ErrorAnswer)
MAX_FRAMES = 1_000_000
"""Most frames of one stream: those of eleven days."""


@routes.get(
    "/v1/requests/<path:request_id>/timeline",
    scope="inference",
    about="Explain where the time of a request went.\n"
    "The id is the response's `id` or its header `X-Request-Id`. A key sees its own requests, one "
    "with the scope `admin` all of them, with the names of other accounts. Ended requests are "
    "kept for some minutes (`kept`).",
    gives=TimelineAnswer,
    statuses=READING,
    parameters=(Parameter("request_id", "The id of a request.", place="path"),),
)
def timeline(service: Service, context: RequestContext, request_id: str) -> Response:
    return json_response(timeline_answer(service, context.caller, request_id))


@routes.get(
    "/v1/watch",
    scope="admin",
    about="Watch the engines: a stream with a frame each second.\n"
    "A frame has the slots, the blocks by owner, the queue, the steps since the frame before, "
    "rates, percentiles, and the open requests with what each waits for. It has no text and no "
    "tokens. A client that reads slowly gets fewer frames.",
    streams=Stream(WatchFrame),
    statuses=(400, 405, 500),
    parameters=(
        Parameter(
            "frames",
            "End after this many frames; if left out, the stream ends with the connection.",
            schema={"type": "integer", "minimum": 1, "maximum": MAX_FRAMES},
        ),
    ),
)
def watch(service: Service, context: RequestContext) -> Response:
    num_frames = whole_number("frames", default=MAX_FRAMES, least=1, most=MAX_FRAMES)
    stream = WatchStream(service.watch, num_frames)
    return service.runner.stream_from(context, stream)


class WatchStream:
    """The frames for one client, as `FrameSource` and as `Watcher`."""

    def __init__(self, poller: WatchPoller, max_frames: int) -> None:
        self._poller = poller
        self._num_left = max_frames
        self._outlet: Outlet | None = None
        self._is_full = False

    def attach(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._is_full = not outlet.watch_buffer(self._on_full, self._on_room)
        self._poller.add(self)

    def detach(self) -> None:
        self._poller.remove(self)

    def show(self, frame: bytes) -> None:
        """Write a frame, unless the client has not read the one before."""
        if self._outlet is None or self._is_full or not self._num_left:
            return
        self._num_left -= 1
        self._outlet.write(sse.frame(frame))
        if not self._num_left:
            self._outlet.finish()

    def end(self) -> None:
        if self._outlet is not None:
            self._outlet.finish()

    def _on_full(self) -> None:
        self._is_full = True

    def _on_room(self) -> None:
        self._is_full = False
