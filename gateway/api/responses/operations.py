"""OpenAPI operations of the Responses routes."""

from __future__ import annotations

from functools import partial

from gateway.api.openai.responses import ErrorAnswer
from gateway.api.responses import responses
from gateway.api.responses.requests import ResponsesBody
from gateway.http.operation import INFERENCE, Operation, Parameter, Stream

_operation = partial(Operation, scope="inference", tag="Responses", error=ErrorAnswer)
ID = Parameter("response_id", "The id of a stored response.", place="path")
STORED = (400, 404, 405, 500)
_INT = {"type": "integer", "minimum": 0}
_ORDER = {"enum": ["asc", "desc"]}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 100}

OPERATIONS = (
    _operation(
        method="post",
        rule="/v1/responses",
        about="Create a response.",
        takes=(ResponsesBody,),
        gives=responses.ResponseObject,
        streams=Stream(responses.ResponseEvent),
        statuses=INFERENCE,
    ),
    _operation(
        method="post",
        rule="/v1/responses/input_tokens",
        about="Count the prompt tokens of a request.",
        takes=(ResponsesBody,),
        gives=responses.ResponseInputTokens,
        statuses=INFERENCE,
    ),
    _operation(
        method="get",
        rule="/v1/responses/<response_id>",
        about="Get a stored response.\n"
        "With `stream=true`, stream the events of a background response after `starting_after`, "
        "including those to come.",
        gives=responses.ResponseObject,
        streams=Stream(responses.ResponseEvent),
        statuses=STORED,
        parameters=(
            ID,
            Parameter("stream", "`true`: return server-sent events."),
            Parameter(
                "starting_after", "The sequence number of the last event received.", schema=_INT
            ),
        ),
    ),
    _operation(
        method="delete",
        rule="/v1/responses/<response_id>",
        about="Delete a stored response.",
        gives=responses.ResponseDeleted,
        statuses=STORED,
        parameters=(ID,),
    ),
    _operation(
        method="post",
        rule="/v1/responses/<response_id>/cancel",
        about="Cancel a background response.\nA response that has ended is returned unchanged.",
        gives=responses.ResponseObject,
        statuses=STORED,
        parameters=(ID,),
    ),
    _operation(
        method="get",
        rule="/v1/responses/<response_id>/input_items",
        about="List the input items of a response's own request.",
        gives=responses.ItemList,
        statuses=STORED,
        parameters=(
            ID,
            Parameter(
                "order", "Sort order; by default `desc`, the last item first.", schema=_ORDER
            ),
            Parameter("limit", "Maximum number of items; by default 20.", schema=_LIMIT),
            Parameter("after", "Return the items after this id."),
        ),
    ),
)
