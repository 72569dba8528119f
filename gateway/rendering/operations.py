"""The render and derender routes, as their documentation sees them."""

from __future__ import annotations

from functools import partial

from gateway.anthropic.schema import MessagesBody
from gateway.anthropic.told import MessagesErrorAnswer
from gateway.openai.schema import ChatBody, CompletionBody
from gateway.openai.told import ChatCompletion, Completion, ErrorAnswer
from gateway.openapi.operation import INFERENCE, Operation
from gateway.rendering import told
from gateway.rendering.schema import DerenderChat, DerenderCompletion
from gateway.responses.schema import ResponsesBody

_post = partial(
    Operation,
    method="post",
    scope="inference",
    tag="Rendering",
    error=ErrorAnswer,
    statuses=INFERENCE,
)

OPERATIONS = (
    _post(
        rule="/v1/chat/completions/render",
        about="A chat request as a request to the token endpoint.",
        takes=(ChatBody,),
        gives=told.RenderedRequest,
    ),
    _post(
        rule="/v1/completions/render",
        about="A completion request as requests to the token endpoint: one for each prompt.",
        takes=(CompletionBody,),
        gives=list[told.RenderedRequest],
    ),
    _post(
        rule="/v1/responses/render",
        about="A request for a response as a request to the token endpoint.",
        takes=(ResponsesBody,),
        gives=told.RenderedRequest,
    ),
    _post(
        rule="/v1/messages/render",
        about="A request for a message as a request to the token endpoint.",
        takes=(MessagesBody,),
        gives=told.RenderedRequest,
        error=MessagesErrorAnswer,
    ),
    _post(
        rule="/v1/chat/completions/derender",
        about="What the token endpoint has said, as a chat tells it.\n"
        "With `stream` one chunk at a time; the state goes with the client.",
        takes=(DerenderChat,),
        gives=(ChatCompletion, told.DerenderedChatChunk),
    ),
    _post(
        rule="/v1/completions/derender",
        about="What the token endpoint has said, as a completion tells it.\n"
        "With `stream` one chunk at a time; the state goes with the client.",
        takes=(DerenderCompletion,),
        gives=(Completion, told.DerenderedCompletionChunk),
    ),
)
