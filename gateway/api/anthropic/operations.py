"""OpenAPI operations of the Messages routes."""

from __future__ import annotations

from functools import partial

from gateway.api.anthropic import responses
from gateway.api.anthropic.requests import CountBody, MessagesBody
from gateway.http.operation import INFERENCE, Operation, Stream

_post = partial(
    Operation,
    method="post",
    tag="Anthropic",
    scope="inference",
    error=responses.MessagesErrorAnswer,
    statuses=INFERENCE,
)

OPERATIONS = (
    _post(
        rule="/v1/messages",
        about="Create a message.",
        takes=(MessagesBody,),
        gives=responses.AnsweredMessage,
        streams=Stream(responses.StreamEvent),
    ),
    _post(
        rule="/v1/messages/count_tokens",
        about="Count the prompt tokens of a request.",
        takes=(CountBody,),
        gives=responses.InputTokenCount,
    ),
)
