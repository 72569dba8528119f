"""The render and derender routes, as their documentation sees them."""

from __future__ import annotations

from functools import partial

from gateway.api.anthropic.requests import MessagesBody
from gateway.api.anthropic.responses import MessagesErrorAnswer
from gateway.api.openai.requests import ChatBody, CompletionBody
from gateway.api.openai.responses import ChatCompletion, CompletionResponse, ErrorAnswer
from gateway.api.render import responses
from gateway.api.render.requests import DerenderChat, DerenderCompletion
from gateway.api.responses.requests import ResponsesBody
from gateway.http.operation import INFERENCE, Operation

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
        gives=responses.RenderedRequest,
    ),
    _post(
        rule="/v1/completions/render",
        about="A completion request as requests to the token endpoint: one for each prompt.",
        takes=(CompletionBody,),
        gives=list[responses.RenderedRequest],
    ),
    _post(
        rule="/v1/responses/render",
        about="A request for a response as a request to the token endpoint.",
        takes=(ResponsesBody,),
        gives=responses.RenderedRequest,
    ),
    _post(
        rule="/v1/messages/render",
        about="A request for a message as a request to the token endpoint.",
        takes=(MessagesBody,),
        gives=responses.RenderedRequest,
        error=MessagesErrorAnswer,
    ),
    _post(
        rule="/v1/chat/completions/derender",
        about="What the token endpoint has said, as a chat tells it.\n"
        "With `stream` one chunk at a time; the state goes with the client.",
        takes=(DerenderChat,),
        gives=(ChatCompletion, responses.DerenderedChatChunk),
    ),
    _post(
        rule="/v1/completions/derender",
        about="What the token endpoint has said, as a completion tells it.\n"
        "With `stream` one chunk at a time; the state goes with the client.",
        takes=(DerenderCompletion,),
        gives=(CompletionResponse, responses.DerenderedCompletionChunk),
    ),
)
