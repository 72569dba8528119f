"""The route of streams that are picked up, as its documentation sees it."""

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
        about="The rest of a stream.\n"
        "Of a chat or a completion that was asked for with the header `X-Resume: 1`, by who asked "
        "for it: the events after the one that `Last-Event-ID` names, and those to come.",
        streams=Stream(dict[str, Any], ends_with="[DONE]"),
        error=ErrorAnswer,
        statuses=(400, 404, 405, 500),
        parameters=(
            Parameter("stream_id", "As the header `X-Resume` of the answer told it.", place="path"),
            Parameter(
                "Last-Event-ID", "The `id` of the last event that was heard.", place="header"
            ),
        ),
    ),
)
