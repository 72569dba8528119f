"""The routes that speak of tokens, as their documentation sees them."""

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
        about="Tokens in, tokens out.\n"
        "With output_mode `text` choices have a text, too, and logprobs as a chat has them.",
        takes=(GenerateBody,),
        gives=GenerateResponse | GenerateTextResponse,
        streams=Stream(GenerateChunk | GenerateTextChunk, ends_with="[DONE]"),
        parameters=(
            Parameter(
                "X-Request-Id", "The request's id; before the body's `request_id`.", "header"
            ),
        ),
    ),
    _post(
        rule="/inference/v1/abort_requests",
        about="End requests of any API by the ids that their clients were told.\n"
        "Each of their answers ends with finish_reason `abort`. A key ends its own requests; one "
        "with the scope `admin` those of all.",
        takes=(AbortBody,),
        gives=AbortedRequests,
    ),
    _post(
        rule="/v1/chat/completions/input_tokens",
        about="How many tokens a chat request would send.",
        takes=(ChatBody,),
        gives=responses.InputTokens,
    ),
    _post(
        rule="/tokenize",
        about="The tokens of a text or of a conversation.\n"
        "A conversation is rendered exactly as a chat request with these fields would be.",
        takes=(TokenizeBody, TokenizeChatBody),
        gives=responses.Tokenized,
    ),
    _post(
        rule="/detokenize",
        about="The text of tokens.",
        takes=(DetokenizeBody,),
        gives=responses.Detokenized,
    ),
)
