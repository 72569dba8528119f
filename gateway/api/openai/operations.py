"""The OpenAI routes, as their documentation sees them."""

from __future__ import annotations

from functools import partial

from gateway.api.openai import responses
from gateway.api.openai.requests import BatchBody, ChatBody, CompletionBody
from gateway.http.operation import INFERENCE, Operation, Stream

_post = partial(
    Operation,
    method="post",
    scope="inference",
    tag="OpenAI",
    error=responses.ErrorAnswer,
    statuses=INFERENCE,
)

OPERATIONS = (
    _post(
        rule="/v1/chat/completions",
        about="Answer a conversation.",
        takes=(ChatBody,),
        gives=responses.ChatCompletion,
        streams=Stream(responses.ChatChunk, ends_with="[DONE]"),
    ),
    _post(
        rule="/v1/chat/completions/batch",
        about="Answer many conversations at once.\n"
        "What the body says beside the conversations holds for all of them.",
        takes=(BatchBody,),
        gives=responses.ChatBatch,
    ),
    _post(
        rule="/v1/completions",
        about="Go on with a text, or with several.",
        takes=(CompletionBody,),
        gives=responses.CompletionResponse,
        streams=Stream(responses.CompletionChunk, ends_with="[DONE]"),
    ),
)
