"""Makes sampling parameters from request fields and defaults.

A parameter that the request does not set has the served model's default (`served_model.py`), or
else OpenAI's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.api.openai.requests import (
    BatchBody,
    BiasPair,
    ChatBody,
    CompletionBody,
    GenerationBody,
    SamplingFields,
)
from gateway.formats.choice_parser import ReadOptions
from gateway.generation.request import PromptRequest
from gateway.text.breakers import USUAL_BREAKERS
from gateway.text.tokenizer import Tokenizer
from protocol.engine.model_card import SamplingDefaults
from protocol.engine.sampling import (
    MAX_BAD_SEQUENCES,
    MAX_BAD_TOKENS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS,
    SamplingParams,
)
from protocol.wire.errors import InvalidRequest

T = TypeVar("T")
Body = ChatBody | BatchBody | CompletionBody
AS_GIVEN = (
    *("typical_p", "top_n_sigma", "dynatemp_range", "dynatemp_exponent", "samplers"),
    *("xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
)
"""Fields that a request has as SamplingParams has them, and that have no default of a model."""
MAX_ENCODED_CHARACTERS = 1 << 14
"""Most characters of the texts of `bad_words` together, and of those of `logit_bias`. They are
encoded in the thread of all requests, in 20 ms or less."""
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
    tokenizer  encodes texts, such as `bad_words`; None: they are ignored
    """
    tokens = token_fields(body, tokenizer)
    bad = _with_model_words(tokens.get("bad_words", []), model.bad_words_ids or [])
    tokens["bad_words"] = bad
    tokens.setdefault("logit_bias", first(model.logit_bias, default={}))
    try:
        return [_params(body, model, place, tokens) for place in range(body.n or 1)]
    except ValueError as error:  # the message begins with the field's name
        field, _, problem = str(error).partition(": ")
        field = body.max_tokens_field if field == "max_tokens" else field
        raise InvalidRequest.at(field, problem) from None


def token_fields(body: SamplingFields, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the fields of SamplingParams for which the request has texts or pairs instead of token
    ids: `logit_bias`, `bad_words` and `dry_breakers`, as far as it sets them. Raise InvalidRequest,
    naming the request's field, for a text that cannot be encoded."""
    fields: dict[str, Any] = {}
    bad = bad_sequences(body.bad_words, tokenizer) if body.bad_words and tokenizer else []
    if isinstance(body.logit_bias, list):
        fields["logit_bias"], banned = bias_of_pairs(body.logit_bias, tokenizer)
        bad = _with_banned(bad, banned)
    elif body.logit_bias is not None:
        fields["logit_bias"] = body.logit_bias
    if bad:
        fields["bad_words"] = bad
    if body.dry_multiplier and tokenizer:
        texts = first(body.dry_sequence_breakers, default=USUAL_BREAKERS)
        fields["dry_breakers"] = tokenizer.breakers(tuple(texts))
    return fields


def bias_of_pairs(
    pairs: Sequence[BiasPair], tokenizer: Tokenizer | None
) -> tuple[dict[int, float], list[int]]:
    """Return the biases of llama.cpp's list, and the tokens that it bans. A text stands for each of
    its tokens, and the biases of a token are added. Without a tokenizer, texts are ignored. Raise
    InvalidRequest if a pair is wrong, or if there are too many tokens."""
    biases: dict[int, float] = {}
    banned: dict[int, None] = {}
    _check_characters("logit_bias", (text for text, _ in pairs if isinstance(text, str)))
    for place, (target, bias) in enumerate(pairs):
        param = f"logit_bias[{place}]"
        if bias is True:
            raise InvalidRequest.wrong(f"{param}[1]", "a number, or false to ban the token", True)
        if isinstance(target, int):
            ids = [target]
        else:
            ids = tokenizer.encode(target, False, param=param) if tokenizer else []
        for token_id in ids:
            if bias is False:
                banned[token_id] = None
            else:
                biases[token_id] = biases.get(token_id, 0.0) + bias
        for ids_so_far, limit, what in (
            (biases, MAX_LOGIT_BIAS, "have a bias"),
            (banned, MAX_BAD_SEQUENCES, "are banned"),
        ):
            if len(ids_so_far) > limit:
                raise InvalidRequest.at(
                    "logit_bias", f"more than {limit:,} tokens {what}, counting those of texts"
                )
    worst = max(map(abs, biases.values()), default=0)
    if worst > MAX_BIAS:
        raise InvalidRequest.at("logit_bias", f"a sum of {worst:g} exceeds the limit of {MAX_BIAS}")
    return biases, list(banned)


def bad_sequences(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the distinct tokenizations of each word: at the start of a text and after a space.
    Raise InvalidRequest if the words are too long together, or have too many tokens."""
    _check_characters("bad_words", words)
    spellings = (
        tuple(tokenizer.encode(text, False, param=f"bad_words[{place}]"))
        for place, word in enumerate(words)
        for text in (word, " " + word.lstrip(" "))
    )
    found: dict[tuple[int, ...], None] = {}
    num_tokens = 0
    for ids in spellings:
        if ids and ids not in found:
            found[ids] = None
            num_tokens += len(ids)
            if num_tokens > MAX_BAD_TOKENS:  # do not encode the rest
                raise InvalidRequest.at(
                    "bad_words", f"more than {MAX_BAD_TOKENS:,} tokens together"
                )
    return [*map(list, found)]


def _check_characters(field: str, texts: Iterable[str]) -> None:
    """Raise InvalidRequest if the texts of `field` are too long together to be encoded."""
    if (total := sum(map(len, texts))) > MAX_ENCODED_CHARACTERS:
        raise InvalidRequest.at(
            field,
            f"the texts have {total:,} characters together; the limit is "
            f"{MAX_ENCODED_CHARACTERS:,}",
        )


def _with_banned(bad: list[list[int]], banned: list[int]) -> list[list[int]]:
    """Return the sequences of `bad_words` and the tokens that `logit_bias` bans. Raise
    InvalidRequest if they are too many."""
    known = {ids[0] for ids in bad if len(ids) == 1}
    both = [*bad, *([token_id] for token_id in banned if token_id not in known)]
    if len(both) > MAX_BAD_SEQUENCES:
        raise InvalidRequest.at(
            "logit_bias",
            f"the {len(both) - len(bad)} tokens that it bans, and the {len(bad)} token sequences "
            f"of bad_words, exceed the limit of {MAX_BAD_SEQUENCES}",
        )
    return both


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
    body: Body, model: SamplingDefaults, place: int, tokens: Mapping[str, Any]
) -> SamplingParams:
    """Return the parameters of choice `place`.

    tokens   the fields that `token_fields` has made
    """
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
        **{name: value for name in AS_GIVEN if (value := getattr(body, name)) is not None},
        **tokens,
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
