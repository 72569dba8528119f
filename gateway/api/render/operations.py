"""OpenAPI operations of the render and derender routes."""

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
        about="Render a chat request into a request to the token endpoint.",
        takes=(ChatBody,),
        gives=responses.RenderedRequest,
    ),
    _post(
        rule="/v1/completions/render",
        about="Render a completion request into requests to the token endpoint, one per prompt.",
        takes=(CompletionBody,),
        gives=list[responses.RenderedRequest],
    ),
    _post(
        rule="/v1/responses/render",
        about="Render a Responses request into a request to the token endpoint.",
        takes=(ResponsesBody,),
        gives=responses.RenderedRequest,
    ),
    _post(
        rule="/v1/messages/render",
        about="Render a Messages request into a request to the token endpoint.",
        takes=(MessagesBody,),
        gives=responses.RenderedRequest,
        error=MessagesErrorAnswer,
    ),
    _post(
        rule="/v1/chat/completions/derender",
        about="Convert a response of the token endpoint into a chat completion.\n"
        "With `stream`, one chunk per call; the client passes the state to the next call.",
        takes=(DerenderChat,),
        gives=(ChatCompletion, responses.DerenderedChatChunk),
    ),
    _post(
        rule="/v1/completions/derender",
        about="Convert responses of the token endpoint into a completion.\n"
        "With `stream`, one chunk per call; the client passes the state to the next call.",
        takes=(DerenderCompletion,),
        gives=(CompletionResponse, responses.DerenderedCompletionChunk),
    ),
)
