"""The Messages routes, as their documentation sees them."""

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
        about="Answer a conversation, in Anthropic's words.",
        takes=(MessagesBody,),
        gives=responses.AnsweredMessage,
        streams=Stream(responses.StreamEvent),
    ),
    _post(
        rule="/v1/messages/count_tokens",
        about="How many tokens a request with these fields would send to the model.",
        takes=(CountBody,),
        gives=responses.InputTokenCount,
    ),
)
