"""The `timings` of a response, for requests with `"timings": true`.

They are made from an `AnswerRecord`, as metrics and the access log are. Fields that llama.cpp also
has use its names and units (milliseconds), so that clients of llama.cpp can show them. If there are
several choices, each time is the time of the slowest choice, and the token counts are sums.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from gateway.generation.group import ChoiceGroup
from gateway.generation.record import AnswerRecord, answer_record

_DIGITS = 3


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds. Speeds are null if nothing was computed or no time was measured."""

    #: Prompt tokens found in a cache.
    cache_n: int
    #: Prompt tokens computed.
    prompt_n: int
    #: Time of the prefill, until the first token.
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    #: Generated tokens.
    predicted_n: int
    #: Time from the first token to the last one.
    predicted_ms: float
    #: Decoding time per token, not counting the first token of each choice.
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    #: Draft tokens.
    draft_n: int
    #: Draft tokens that were accepted.
    draft_n_accepted: int
    #: Time in the chat template and the tokenizer.
    tokenize_ms: float
    #: Time waiting for the grammar to be compiled.
    grammar_ms: float
    #: Time waiting for a slot.
    queue_ms: float
    #: Time waiting for K/V that was fetched instead of computed.
    fetch_ms: float
    #: Time waiting for images to be encoded.
    encode_ms: float
    #: Time from preemptions until the request ran again.
    preempted_ms: float
    #: Time of detokenizing and parsing in the gateway.
    detokenize_ms: float
    #: Time from the start of the request to the first token.
    first_token_ms: float | None
    #: Time from the start of the request to its end.
    total_ms: float


def timings_of_group(group: ChoiceGroup) -> Timings | UnsetType:
    """Return the response's `timings`; UNSET if they were not requested."""
    parsing_s = group.parsing_s
    if parsing_s is None:
        return UNSET
    return timings_of(answer_record(group.timeline, group), parsing_s)


def timings_of(record: AnswerRecord, detokenize_s: float) -> Timings:
    """Return the timings in `record`. `detokenize_s` is the time spent in the parsers."""
    times, later = record.times, record.generated_tokens - len(record.choices)
    computed = record.prompt_tokens - record.cached_tokens
    return Timings(
        cache_n=record.cached_tokens,
        prompt_n=computed,
        prompt_ms=_ms(times.prefill_s),
        prompt_per_token_ms=_per_token_ms(times.prefill_s, computed),
        prompt_per_second=_per_second(computed, times.prefill_s),
        predicted_n=record.generated_tokens,
        predicted_ms=_ms(times.decode_s),
        predicted_per_token_ms=_per_token_ms(times.decode_s, later),
        predicted_per_second=_per_second(later, times.decode_s),
        draft_n=record.draft_tokens,
        draft_n_accepted=record.accepted_tokens,
        tokenize_ms=_ms(record.tokenize_s),
        grammar_ms=_ms(times.grammar_s),
        queue_ms=_ms(times.queued_s),
        fetch_ms=_ms(times.fetching_s),
        encode_ms=_ms(times.encoding_s),
        preempted_ms=_ms(times.preempted_s),
        detokenize_ms=_ms(detokenize_s),
        first_token_ms=None if record.first_token_s is None else _ms(record.first_token_s),
        total_ms=_ms(record.answered_s),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, _DIGITS)


def _per_token_ms(seconds: float, tokens: int) -> float | None:
    return _ms(seconds / tokens) if tokens > 0 and seconds > 0 else None


def _per_second(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, _DIGITS) if tokens > 0 and seconds > 0 else None
