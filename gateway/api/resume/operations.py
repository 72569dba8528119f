"""OpenAPI operation of the route that resumes a stream."""

from __future__ import annotations

from typing import Any

from gateway.api.openai.responses import ErrorAnswer
from gateway.http.operation import Operation, Parameter, Stream

OPERATIONS = (
    Operation(
        method="get",
        rule="/v1/streams/<stream_id>",
        scope="inference",
        tag="OpenAI",
        about="Resume a stream.\n"
        "Returns the events after `Last-Event-ID` of a chat or completion stream that was "
        "requested with the header `X-Resume: 1` and the same API key.",
        streams=Stream(dict[str, Any], ends_with="[DONE]"),
        error=ErrorAnswer,
        statuses=(400, 404, 405, 500),
        parameters=(
            Parameter("stream_id", "The value of the response header `X-Resume`.", place="path"),
            Parameter("Last-Event-ID", "The `id` of the last event received.", place="header"),
        ),
    ),
)
