"""The Responses routes, as their documentation sees them."""

from __future__ import annotations

from functools import partial

from gateway.api.openai.responses import ErrorAnswer
from gateway.api.responses import responses
from gateway.api.responses.requests import ResponsesBody
from gateway.http.operation import INFERENCE, Operation, Parameter, Stream

_operation = partial(Operation, scope="inference", tag="Responses", error=ErrorAnswer)
ID = Parameter("response_id", "As it was told when the response was made.", place="path")
STORED = (400, 404, 405, 500)
_INT = {"type": "integer", "minimum": 0}
_ORDER = {"enum": ["asc", "desc"]}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 100}

OPERATIONS = (
    _operation(
        method="post",
        rule="/v1/responses",
        about="Answer items with items.",
        takes=(ResponsesBody,),
        gives=responses.ResponseObject,
        streams=Stream(responses.ResponseEvent),
        statuses=INFERENCE,
    ),
    _operation(
        method="post",
        rule="/v1/responses/input_tokens",
        about="How many tokens a request with these fields would send to the model.",
        takes=(ResponsesBody,),
        gives=responses.ResponseInputTokens,
        statuses=INFERENCE,
    ),
    _operation(
        method="get",
        rule="/v1/responses/<response_id>",
        about="A response that was kept.\n"
        "With `stream=true` the events of one that was made in the background: those after "
        "`starting_after`, and those to come.",
        gives=responses.ResponseObject,
        streams=Stream(responses.ResponseEvent),
        statuses=STORED,
        parameters=(
            ID,
            Parameter("stream", "`true`: as server-sent events."),
            Parameter(
                "starting_after", "The number of the last event that was heard.", schema=_INT
            ),
        ),
    ),
    _operation(
        method="delete",
        rule="/v1/responses/<response_id>",
        about="Forget a response.",
        gives=responses.ResponseDeleted,
        statuses=STORED,
        parameters=(ID,),
    ),
    _operation(
        method="post",
        rule="/v1/responses/<response_id>/cancel",
        about="End a response that is made in the background.\nOne that is over is told as it is.",
        gives=responses.ResponseObject,
        statuses=STORED,
        parameters=(ID,),
    ),
    _operation(
        method="get",
        rule="/v1/responses/<response_id>/input_items",
        about="What a response answered: the items of its own request.",
        gives=responses.ItemList,
        statuses=STORED,
        parameters=(
            ID,
            Parameter("order", "By default the last come first.", schema=_ORDER),
            Parameter("limit", "At most so many; 20 if not said.", schema=_LIMIT),
            Parameter("after", "The id of the item behind which to begin."),
        ),
    ),
)
