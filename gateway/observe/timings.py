"""`timings` of a response: where its time went, for whoever asks with `"timings": true`.

Made of the same record as metrics and the access log. Names are llama.cpp's where it has one, so
that its clients show speeds; times are in milliseconds, as its are. Of several choices each time is
that of the slowest, and tokens are those of all.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gateway.formats.events import OutputDelta
from gateway.generation.group import ChoiceGroup
from gateway.generation.record import AnswerRecord, answer_record
from gateway.generation.request import OutputParser
from protocol.messages import Output

_DIGITS = 3


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """In milliseconds. Speeds are null where nothing was computed, or no time was measured.

    cache_n, prompt_n     tokens of the prompt that were found, and that were computed
    prompt_ms             computing them, until the first token was there
    predicted_n           tokens generated;  predicted_ms: from the first one to the last
    predicted_per_token_ms, predicted_per_second   of those behind the first, of each choice
    draft_n, draft_n_accepted   tokens guessed ahead, and those of them that are in the answer
    tokenize_ms           template and tokenizer
    grammar_ms, queue_ms  waiting for the grammar to be compiled, and for a slot
    fetch_ms              waiting for K/V that was fetched instead of computed
    preempted_ms          having made way for others
    detokenize_ms         making text and events of tokens
    first_token_ms, total_ms   since the request began
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    draft_n: int
    draft_n_accepted: int
    tokenize_ms: float
    grammar_ms: float
    queue_ms: float
    fetch_ms: float
    preempted_ms: float
    detokenize_ms: float
    first_token_ms: float | None
    total_ms: float


class MeasuredReader:
    """A reader, and how long it has read. Only where somebody asks: it costs two looks at the clock
    with all that comes."""

    __slots__ = ("_inner", "spent_s")

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner
        self.spent_s = 0.0

    @property
    def may_stop(self) -> bool:
        return self._inner.may_stop

    def push(self, output: Output) -> OutputDelta:
        began = time.perf_counter()
        try:
            return self._inner.push(output)
        finally:
            self.spent_s += time.perf_counter() - began


def measure(answer: ChoiceGroup) -> None:
    """From now on, so that `told_timings` has something to tell. Before the answer is opened."""
    for choice in answer.choices:
        choice.reader = MeasuredReader(choice.reader)


def told_timings(answer: ChoiceGroup) -> dict[str, Any]:
    """A member more of a response, where its request asked for it."""
    readers = [choice.reader for choice in answer.choices]
    spent = [reader.spent_s for reader in readers if isinstance(reader, MeasuredReader)]
    if not spent:
        return {}
    return {"timings": timings_of(answer_record(answer.journal, answer), sum(spent))}


def timings_of(record: AnswerRecord, detokenize_s: float) -> Timings:
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
