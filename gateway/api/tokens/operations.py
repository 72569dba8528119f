"""OpenAPI operations of the token-level routes."""

from __future__ import annotations

from functools import partial

from gateway.api.openai.requests import ChatBody
from gateway.api.openai.responses import ErrorAnswer
from gateway.api.tokens import responses
from gateway.api.tokens.generate_requests import AbortBody, GenerateBody
from gateway.api.tokens.generate_responses import (
    AbortedRequests,
    GenerateChunk,
    GenerateResponse,
    GenerateTextChunk,
    GenerateTextResponse,
)
from gateway.api.tokens.requests import DetokenizeBody, TokenizeBody, TokenizeChatBody
from gateway.http.operation import INFERENCE, Operation, Parameter, Stream

_post = partial(
    Operation, method="post", scope="inference", tag="Tokens", error=ErrorAnswer, statuses=INFERENCE
)

OPERATIONS = (
    _post(
        rule="/inference/v1/generate",
        about="Generate token ids from token ids.\n"
        "With output_mode `text`, choices also have text, and logprobs in the shape of a chat's.",
        takes=(GenerateBody,),
        gives=GenerateResponse | GenerateTextResponse,
        streams=Stream(GenerateChunk | GenerateTextChunk, ends_with="[DONE]"),
        parameters=(
            Parameter(
                "X-Request-Id", "The request's id; takes precedence over `request_id`.", "header"
            ),
        ),
    ),
    _post(
        rule="/inference/v1/abort_requests",
        about="Abort requests of any API by their response ids.\n"
        "Their choices end with finish_reason `abort`. A key can abort its own requests; one with "
        "the scope `admin` can abort any.",
        takes=(AbortBody,),
        gives=AbortedRequests,
    ),
    _post(
        rule="/v1/chat/completions/input_tokens",
        about="Count the prompt tokens of a chat request.",
        takes=(ChatBody,),
        gives=responses.InputTokens,
    ),
    _post(
        rule="/tokenize",
        about="Tokenize a text or a conversation.\n"
        "A conversation is rendered as a chat request with the same fields would be.",
        takes=(TokenizeBody, TokenizeChatBody),
        gives=responses.Tokenized,
    ),
    _post(
        rule="/detokenize",
        about="Convert token ids to text.",
        takes=(DetokenizeBody,),
        gives=responses.Detokenized,
    ),
)
