"""The routes that speak of tokens, as their documentation sees them."""

from __future__ import annotations

from functools import partial

from gateway.openai.told import ErrorAnswer
from gateway.openapi.operation import INFERENCE, Operation
from gateway.tokens import told
from gateway.tokens.schema import DetokenizeBody, TokenizeBody, TokenizeChatBody

_post = partial(Operation, method="post", tag="Tokens", error=ErrorAnswer, statuses=INFERENCE)

OPERATIONS = (
    _post(
        rule="/tokenize",
        about="The tokens of a text or of a conversation.\n"
        "A conversation is rendered exactly as a chat request with these fields would be.",
        takes=(TokenizeBody, TokenizeChatBody),
        gives=told.Tokenized,
    ),
    _post(
        rule="/detokenize",
        about="The text of tokens.",
        takes=(DetokenizeBody,),
        gives=told.Detokenized,
    ),
)
