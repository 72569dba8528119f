"""Turns a GenerateBody into a prompt request. Raises InvalidRequest naming the field.

Text is needed only for stop strings, output mode "text", `bad_words`, and structured outputs, for
which the end of the prompt decides whether reasoning comes first.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.api.openai.prepare import translate_error
from gateway.api.openai.requests import unsupported
from gateway.api.openai.structured import structured_form
from gateway.api.tokens.requests import (
    REFUSED,
    REFUSED_SAMPLING,
    GenerateBody,
    GenerateSampling,
)
from gateway.engine.kv_params import KVTransferParams, apply_kv_params
from gateway.formats.choice_parser import (
    AnswerOptions,
    ParserFactory,
    ReadOptions,
    TokenPassthroughFactory,
)
from gateway.formats.model_format import AnswerStart
from gateway.generation.parameters import bad_sequences, first, nth_seed
from gateway.generation.request import OutputParserFactory, PromptRequest
from gateway.http.body import unknown_fields
from gateway.served_model import ServedModel
from protocol.errors import InvalidRequest, RequestError
from protocol.grammar import Grammar, check_grammar
from protocol.kv import KV_FIELD
from protocol.sampling import SamplingParams, check_token_ids

SAMPLING = "sampling_params"
STRUCTURED = f"{SAMPLING}.structured_outputs"
BUDGET = f"{SAMPLING}.thinking_token_budget"
TAIL_TOKENS = 1 << 14
"""Number of the prompt's last tokens that are searched for an open reasoning block."""
_FIELD = re.compile(r"\w*")
"""Matches the field at the start of a path."""
_SAME = tuple(set(SamplingParams.__struct_fields__) - {"seed", "bad_words"})


def to_request(
    body: GenerateBody, model: ServedModel, kv_params: KVTransferParams | None = None
) -> PromptRequest:
    prompt_request = PromptRequest(
        body.token_ids,
        choices_of(body.sampling_params, model),
        _parsers(body, model),
        grammar=grammar_of(body, model),
    )
    return apply_kv_params([prompt_request], kv_params, streams=bool(body.stream))[0]


def check(body: GenerateBody, max_n: int) -> None:
    """Check the combination of fields, and refuse unsupported ones."""
    sampling = body.sampling_params
    for field in REFUSED:
        if getattr(body, field) is not None:
            raise unsupported(field)
    for field, idle in REFUSED_SAMPLING.items():
        if getattr(sampling, field) not in idle:
            raise unsupported(f"{SAMPLING}.{field}")
    if (sampling.n or 1) > max_n:
        raise _invalid("n", f"{sampling.n} exceeds this server's limit of {max_n}")
    if sampling.logprob_token_ids and sampling.logprobs is None:
        raise _invalid("logprob_token_ids", "requires logprobs")
    if sampling.prompt_logprobs is not None and body.stream:
        raise _invalid("prompt_logprobs", "not available with stream")
    if sampling.detokenize is False:
        if sampling.stop_strings:
            raise _invalid("stop", "requires detokenize")
        if body.output_mode == "text":
            raise InvalidRequest.at("output_mode", f"'text' requires {SAMPLING}.detokenize")


def unknown(fields: dict[str, Any]) -> list[str]:
    """Return the paths of unknown fields, including those in `sampling_params`."""
    inner = unknown_fields(fields[SAMPLING], GenerateSampling)
    return [*unknown_fields(fields, GenerateBody), *(f"{SAMPLING}.{name}" for name in inner)]


def ignored_fields(
    unknown: list[str], body: GenerateBody, kv_params: KVTransferParams | None
) -> list[str]:
    """Return the fields without effect: unknown ones, and a K/V transfer that does not happen.
    Raise InvalidRequest if the body has strict_params."""
    form = structured_form(body.sampling_params.structured_outputs, STRUCTURED)
    ignored = [*unknown, *(form.ignored if form else ())]
    if kv_params is None and body.kv_transfer_params is not None:
        ignored.append(KV_FIELD)
    if ignored and body.strict_params:
        raise InvalidRequest.at(
            ignored[0],
            f"without effect here, and strict_params is true; fields without effect: "
            f"{', '.join(ignored)}",
        )
    return ignored


def namespace_of(body: GenerateBody) -> str:
    """Return the prefix cache namespace. skip_reading_prefix_cache gets a unique, empty one."""
    if body.sampling_params.skip_reading_prefix_cache:
        return uuid.uuid4().hex
    return body.cache_salt or ""


def rename_field(error: RequestError, body: GenerateBody) -> RequestError:
    """Rename the engine's field in an error to the field of the request."""
    param = error.param or ""
    field = _FIELD.match(param)[0]  # type: ignore[index]  # matches any text
    if field in SamplingParams.__struct_fields__:  # the message contains the name, too
        return translate_error(error, lambda name: f"{SAMPLING}.{name}")
    if field == "prompt" != param:  # one of its tokens
        return translate_error(error, lambda name: "token_ids" + name.removeprefix(field))
    fields = {"prompt": "token_ids", "grammar": "grammar" if body.grammar else STRUCTURED}
    error.param = fields.get(param, error.param)
    return error


def choices_of(sampling: GenerateSampling, model: ServedModel) -> list[SamplingParams]:
    """Return the parameters of each of the n choices. The model's defaults are not applied."""
    fields = {name: getattr(sampling, name) for name in _SAME}
    fields = {name: value for name, value in fields.items() if value is not None}
    if sampling.bad_words:
        fields["bad_words"] = bad_sequences(sampling.bad_words, model.tokenizer)
    try:
        return [
            SamplingParams(**fields, seed=nth_seed(sampling.seed, place))
            for place in range(sampling.n or 1)
        ]
    except ValueError as error:  # the message starts with the field's name
        field = _FIELD.match(str(error))[0]  # type: ignore[index]  # matches any text
        raise InvalidRequest(f"{SAMPLING}.{error}", param=f"{SAMPLING}.{field}") from None


def grammar_of(body: GenerateBody, model: ServedModel) -> Grammar | None:
    """Return the body's `grammar`, or one of `structured_outputs` and the thinking budget."""
    found = structured_form(body.sampling_params.structured_outputs, STRUCTURED)
    form = found.body if found else None
    max_thinking = body.sampling_params.thinking_token_budget
    limits = max_thinking is not None and max_thinking >= 0
    if body.grammar is not None:
        for field, is_there in ((STRUCTURED, form is not None), (BUDGET, limits)):
            if is_there:
                raise InvalidRequest.at(field, "cannot be combined with grammar, which is complete")
        check_grammar(body.grammar)
        return body.grammar
    if form is None and not limits:
        return None
    start = _answer_start(body, model, calls=form is None)
    budget = start.budget(BUDGET, max_thinking) if limits and max_thinking is not None else None
    if form is None:
        return Grammar(budget=budget) if budget else None
    return _corrected(start, body.reasoning_ended).grammar(form, budget)


def _corrected(start: AnswerStart, ended: bool | None) -> AnswerStart:
    """Apply `reasoning_ended`, which overrides what the end of the prompt suggests."""
    return start if ended is None else msgspec.structs.replace(start, closed=ended)


def _answer_start(body: GenerateBody, model: ServedModel, *, calls: bool) -> AnswerStart:
    parser_kwargs = body.reasoning_parser_kwargs
    given: Mapping[str, Any] = (parser_kwargs.chat_template_kwargs if parser_kwargs else None) or {}
    check_token_ids(body.token_ids, model.card.vocab_size, "token_ids")
    tail = model.tokenizer.decode(body.token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return model.output_format.begin(tail, {**model.default_kwargs, **given}, calls=calls)


def _parsers(body: GenerateBody, model: ServedModel) -> OutputParserFactory:
    """Return the parser factory. Stop strings apply to all text; in a rendered chat, to content
    only."""
    sampling = body.sampling_params
    if body.output_mode != "text" and not sampling.stop_strings:
        return TokenPassthroughFactory(model.card.eos_token_ids)
    options = ReadOptions(
        stop=sampling.stop_strings,
        include_stop=bool(sampling.include_stop_str_in_output),
        min_tokens=sampling.min_tokens or 0,
        skip_special_tokens=first(sampling.skip_special_tokens, default=True),
        continues=True,
    )
    if body.output_mode == "text" or body.reasoning_parser_kwargs is None:
        return ParserFactory(model.tokenizer, options)
    start = _answer_start(body, model, calls=body.reads_calls is not False)
    answer = None
    if start.bound is not None:
        grammar = body.grammar
        has_grammar = grammar is not None and grammar.body is not None
        answer = AnswerOptions(
            format=start.bound.with_drafts() if has_grammar else start.bound,
            starts_inside=start.inside,
            calls_or_text=grammar is not None and grammar.calls is not None,
        )
    return ParserFactory(model.tokenizer, msgspec.structs.replace(options, continues=False), answer)


def _invalid(field: str, why: str) -> InvalidRequest:
    return InvalidRequest.at(f"{SAMPLING}.{field}", f"{why}")
