"""How the next token is chosen: the parameters of one generation and the bounds of each.

The bounds are written here once: HTTP schemas use the same annotated types, so a number that a
route accepts is a number that the engine accepts. What only text can decide (stop strings, n) is
not here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
"""Words, as a user counts them."""
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
"""A word has up to two spellings in tokens: at the beginning of a text, and after a space."""
MAX_BAD_TOKENS = 1024
"""Of all sequences together."""
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_TOKENS = 1 << 24

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
MaxTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
MinTokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 24)]
MinP = Annotated[float, Meta(ge=0, le=1)]
AdditivePenalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]
"""Logits are multiplied or divided by it: nearer to 0 they would not stay finite."""
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
BiasValue = Annotated[float, Meta(ge=-100, le=100)]
LogitBias = Annotated[dict[TokenId, BiasValue], Meta(max_length=MAX_LOGIT_BIAS)]
BadWord = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_BAD_TOKENS)]
BadWords = Annotated[list[BadWord], Meta(max_length=MAX_BAD_SEQUENCES)]
AllowedTokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)]
LogprobsOf = Literal["model", "sampling", "both"]
LogprobTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One generation's parameters, complete: no default of the model or the server is applied
    later.

    max_tokens         None: until the context is full. 0: only compute the prompt (for its
                       logprobs)
    min_tokens         tokens before which no stop token may be chosen
    temperature        0: greedy, the most likely token
    top_k              0 or -1: off
    seed               None: the engine draws one
    stop_token_ids     end the answer like the model's own end tokens
    ignore_eos         the model's own end tokens do not end the answer
    logprobs           None: none; n: the chosen token's and the n most likely ones'
    prompt_logprobs    the same for each prompt token after the first
    bad_words          token sequences that the answer never contains
    allowed_token_ids  None: all; else nothing but these is ever chosen, end tokens included
    logprob_token_ids  tokens whose logprobs are told at each sampled token, whatever was chosen
    logprobs_of        which distribution `logprobs` are of: "model", what the model said;
                       "sampling", what the token was drawn from, after all of the above and a
                       grammar; "both", the model's, and the other's of the same tokens beside them
    """

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    min_tokens: MinTokens = 0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    frequency_penalty: AdditivePenalty = 0.0
    presence_penalty: AdditivePenalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Seed | None = None
    stop_token_ids: StopTokenIds = []
    ignore_eos: bool = False
    logit_bias: LogitBias = {}
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    bad_words: BadWords = []
    allowed_token_ids: AllowedTokenIds | None = None
    logprob_token_ids: LogprobTokenIds = []
    logprobs_of: LogprobsOf = "model"

    def __post_init__(self) -> None:
        for name in _FLOATS:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number")
        if not all(map(math.isfinite, self.logit_bias.values())):
            worst = next(t for t, bias in self.logit_bias.items() if not math.isfinite(bias))
            raise ValueError(f"logit_bias.{worst} must be a finite number")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) must not be below min_tokens ({self.min_tokens})"
            )
        if sum(map(len, self.bad_words)) > MAX_BAD_TOKENS:
            raise ValueError(f"bad_words must not be more than {MAX_BAD_TOKENS} tokens together")
        if self.logprobs_of != "model":
            self._check_logprobs_of()

    def _check_logprobs_of(self) -> None:
        if self.logprobs is None and not self.logprob_token_ids:
            raise ValueError(f"logprobs_of {self.logprobs_of!r} needs logprobs")
        if self.temperature == 0:
            raise ValueError(
                f"logprobs_of {self.logprobs_of!r} needs a temperature above 0: nothing is drawn "
                "at 0"
            )


_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest, naming the element at fault, if a token id is beyond the model's
    vocabulary.
    """
    for field, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logprob_token_ids", params.logprob_token_ids),
        *((f"bad_words[{place}]", word) for place, word in enumerate(params.bad_words)),
    ):
        check_token_ids(ids, vocab_size, field)
    worst = max(params.logit_bias, default=0)
    if worst >= vocab_size:
        raise _unknown_token(worst, vocab_size, f"logit_bias.{worst}")


def check_token_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raise InvalidRequest, naming the first element of the list `field` that is no token id of the
    vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        place = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise _unknown_token(ids[place], vocab_size, f"{field}[{place}]")


def _unknown_token(token_id: int, vocab_size: int, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: token id {token_id} is not in the vocabulary of {vocab_size} tokens", param=param
    )
