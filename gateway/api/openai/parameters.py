"""Makes sampling parameters from request fields and defaults.

A parameter that the request does not set has the served model's default (`served_model.py`), or
else OpenAI's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from gateway.api.openai.requests import BatchBody, ChatBody, CompletionBody, GenerationBody
from gateway.formats.choice_parser import ReadOptions
from gateway.generation.request import PromptRequest
from gateway.text.tokenizer import Tokenizer
from protocol.engine.model_card import SamplingDefaults
from protocol.engine.sampling import (
    MAX_BAD_SEQUENCES,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS,
    SamplingParams,
)
from protocol.wire.errors import InvalidRequest

T = TypeVar("T")
Body = ChatBody | BatchBody | CompletionBody
_SEEDS = 1 << 64


def first(*values: T | None, default: T) -> T:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), default)


def choices_of(
    body: Body, model: SamplingDefaults, tokenizer: Tokenizer | None = None
) -> list[SamplingParams]:
    """Return the sampling parameters of each of the `n` choices of one prompt. Raise
    InvalidRequest, naming the field, if a value is invalid or two fields exclude each other.

    model      the served model's defaults, for fields that the body does not set
    tokenizer  encodes `bad_words`; None: `bad_words` are ignored
    """
    bad = bad_sequences(body.bad_words, tokenizer) if body.bad_words and tokenizer else []
    bad = _with_model_words(bad, model.bad_words_ids or [])
    try:
        return [_params(body, model, place, bad) for place in range(body.n or 1)]
    except ValueError as error:  # the message begins with the field's name
        field, rest = str(error).split(maxsplit=1)
        field = body.max_tokens_field if field == "max_tokens" else field
        raise InvalidRequest(f"{field} {rest}", param=field) from None


def bad_sequences(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the distinct tokenizations of each word: at the start of a text and after a space."""
    spellings = (
        tuple(tokenizer.encode(text, False, param=f"bad_words[{place}]"))
        for place, word in enumerate(words)
        for text in (word, " " + word.lstrip(" "))
    )
    return [list(ids) for ids in dict.fromkeys(spellings) if ids]


def _with_model_words(bad: list[list[int]], model: list[list[int]]) -> list[list[int]]:
    """Return the bad sequences of a request and those of its model. Raise InvalidRequest if they
    are too many."""
    words = [*bad, *(each for each in model if each not in bad)]
    if len(words) > MAX_BAD_SEQUENCES:
        raise InvalidRequest.at(
            "bad_words",
            f"{len(bad)} token sequences, and the {len(words) - len(bad)} that this model never "
            f"writes, exceed the limit of {MAX_BAD_SEQUENCES}",
        )
    return words


def _min_tokens(body: Body, model: SamplingDefaults) -> int:
    """Return the fewest tokens of an answer. The model's default is at most `max_tokens`."""
    if body.min_tokens is not None:
        return body.min_tokens
    return min(model.min_tokens or 0, first(body.answer_tokens, default=MAX_TOKENS))


def _params(
    body: Body, model: SamplingDefaults, place: int, bad: list[list[int]]
) -> SamplingParams:
    return SamplingParams(
        max_tokens=body.answer_tokens,
        min_tokens=_min_tokens(body, model),
        temperature=first(body.temperature, model.temperature, default=1.0),
        top_p=first(body.top_p, model.top_p, default=1.0),
        top_k=first(body.top_k, model.top_k, default=0),
        min_p=first(body.min_p, model.min_p, default=0.0),
        frequency_penalty=first(body.frequency_penalty, model.frequency_penalty, default=0.0),
        presence_penalty=first(body.presence_penalty, model.presence_penalty, default=0.0),
        repetition_penalty=first(body.repetition_penalty, model.repetition_penalty, default=1.0),
        seed=nth_seed(body.seed, place),
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        logit_bias=first(body.logit_bias, model.logit_bias, default={}),
        bad_words=bad,
        allowed_token_ids=body.allowed_token_ids,
        logprob_token_ids=body.logprob_token_ids or [],
        logprobs=body.num_logprobs,
        prompt_logprobs=_prompt_logprobs(body),
    )


def _prompt_logprobs(body: Body) -> int | None:
    """Return the larger of `prompt_logprobs` and, if the prompt is echoed, `logprobs`."""
    counts = [body.prompt_logprobs]
    if isinstance(body, CompletionBody) and body.echo:
        counts.append(body.logprobs)
    return max((count for count in counts if count is not None), default=None)


def nth_seed(seed: int | None, place: int) -> int | None:
    """Return the seed of choice `place`: `seed + place`, wrapped to a signed 64-bit number. So a
    request for one choice with that seed reproduces the choice. Return None if `seed` is None or
    -1, which mean no seed."""
    if seed is None or seed == -1:
        return None
    return (seed + place + _SEEDS // 2) % _SEEDS - _SEEDS // 2


def check_counts(
    prompt_requests: Sequence[PromptRequest], body: GenerationBody, max_n: int, max_answers: int
) -> None:
    """Raise InvalidRequest if `n` exceeds `max_n`, or if the choices of all prompts exceed
    `max_answers`."""
    if (body.n or 1) > max_n:
        raise InvalidRequest(f"n: {body.n} exceeds this server's limit of {max_n}", param="n")
    answers = sum(len(prompt_request.choices) for prompt_request in prompt_requests)
    if answers > max_answers:
        raise InvalidRequest(
            f"n: {answers:,} choices (prompts times n) exceed this server's limit of "
            f"{max_answers:,}",
            param="n",
        )


def with_stop_tokens(params: SamplingParams, token_ids: Sequence[int]) -> SamplingParams:
    """Return a copy of `params` with which the tokens `token_ids` end the answer too. If `params`
    ignore end tokens, return them unchanged. Raise InvalidRequest if there are too many."""
    if params.ignore_eos:
        return params
    ids = list(dict.fromkeys([*params.stop_token_ids, *token_ids]))
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest.at(
            "stop_token_ids",
            f"{len(params.stop_token_ids)} tokens, and the {len(ids) - len(params.stop_token_ids)} "
            f"that end the text of this model, exceed the limit of {MAX_STOP_TOKEN_IDS}",
        )
    return msgspec.structs.replace(params, stop_token_ids=ids)


def read_options(
    body: GenerationBody,
    params: SamplingParams,
    *,
    continues: bool,
    end_token_ids: Sequence[int] = (),
) -> ReadOptions:
    """Return the options of the parsers.

    params         sampling parameters of one of the choices
    end_token_ids  ends of the answer that the request does not name
    """
    named = body.stop_token_ids or ()
    return ReadOptions(
        stop=body.stop_strings,
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=params.min_tokens,
        skip_special_tokens=first(body.skip_special_tokens, default=True),
        continues=continues,
        end_token_ids=[token_id for token_id in end_token_ids if token_id not in named],
    )
