"""OpenAPI operations of the OpenAI routes."""

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
        about="Create a chat completion.",
        takes=(ChatBody,),
        gives=responses.ChatCompletion,
        streams=Stream(responses.ChatChunk, ends_with="[DONE]"),
    ),
    _post(
        rule="/v1/chat/completions/batch",
        about="Create chat completions for several conversations.\n"
        "All fields except `messages` apply to every conversation.",
        takes=(BatchBody,),
        gives=responses.ChatBatch,
    ),
    _post(
        rule="/v1/completions",
        about="Create a completion of one or more prompts.",
        takes=(CompletionBody,),
        gives=responses.CompletionResponse,
        streams=Stream(responses.CompletionChunk, ends_with="[DONE]"),
    ),
)
