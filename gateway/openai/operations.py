"""The OpenAI routes, as their documentation sees them."""

from __future__ import annotations

from functools import partial

from gateway.openai import told
from gateway.openai.schema import BatchBody, ChatBody, CompletionBody
from gateway.openapi.operation import INFERENCE, Operation, Stream

_post = partial(
    Operation,
    method="post",
    scope="inference",
    tag="OpenAI",
    error=told.ErrorAnswer,
    statuses=INFERENCE,
)

OPERATIONS = (
    _post(
        rule="/v1/chat/completions",
        about="Answer a conversation.",
        takes=(ChatBody,),
        gives=told.ChatCompletion,
        streams=Stream(told.ChatChunk, ends_with="[DONE]"),
    ),
    _post(
        rule="/v1/chat/completions/batch",
        about="Answer many conversations at once.\n"
        "What the body says beside the conversations holds for all of them.",
        takes=(BatchBody,),
        gives=told.ChatBatch,
    ),
    _post(
        rule="/v1/completions",
        about="Go on with a text, or with several.",
        takes=(CompletionBody,),
        gives=told.Completion,
        streams=Stream(told.CompletionChunk, ends_with="[DONE]"),
    ),
)
