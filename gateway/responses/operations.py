"""The Responses routes, as their documentation sees them."""

from __future__ import annotations

from functools import partial

from gateway.openai.told import ErrorAnswer
from gateway.openapi.operation import INFERENCE, Operation, Stream
from gateway.responses import told
from gateway.responses.schema import ResponsesBody

_operation = partial(Operation, tag="Responses", error=ErrorAnswer)

OPERATIONS = (
    _operation(
        method="post",
        rule="/v1/responses",
        about="Answer items with items.",
        takes=(ResponsesBody,),
        gives=told.ResponseObject,
        streams=Stream(told.ResponseEvent),
        statuses=INFERENCE,
    ),
)
