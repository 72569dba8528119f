"""The routes that show what the engines do, and what the time of a request went to."""

from __future__ import annotations

from flask import Response

from gateway.api.openai.responses import ErrorAnswer
from gateway.api.watch.responses import TimelineAnswer
from gateway.api.watch.timelines import timeline_answer
from gateway.context import RequestContext
from gateway.http.route import READING, Parameter, Routes, json_response
from gateway.service import Service

routes = Routes("Operators", ErrorAnswer)


@routes.get(
    "/v1/requests/<path:request_id>/timeline",
    about="Explain what the time of a request went to.\n"
    "The id is the response's `id` or its header `X-Request-Id`. A key sees its own requests, one "
    "with the scope `admin` all of them, with the names of other accounts. Ended requests are "
    "kept for some minutes (`kept`).",
    gives=TimelineAnswer,
    statuses=READING,
    parameters=(Parameter("request_id", "The id of a request.", place="path"),),
)
def timeline(service: Service, context: RequestContext, request_id: str) -> Response:
    return json_response(timeline_answer(service, context.caller, request_id))
