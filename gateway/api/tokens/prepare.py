"""Turns a GenerateBody into a prompt request. Raises InvalidRequest naming the field.

The tokenizer is needed only for stop strings, `bad_words`, output mode "text", structured outputs
and a thinking budget. The text at the end of the prompt shows whether the answer starts with
reasoning. It is read for structured outputs, for a thinking budget, and to parse the answer if
`reasoning_parser_kwargs` is set.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.api.openai.field_paths import ignored_fields
from gateway.api.openai.parameters import first, nth_seed, token_fields
from gateway.api.openai.requests import unsupported
from gateway.api.openai.structured import structured_form
from gateway.api.tokens.requests import (
    REFUSED,
    REFUSED_SAMPLING,
    GenerateBody,
    GenerateSampling,
)
from gateway.formats.choice_parser import (
    AnswerOptions,
    ParserFactory,
    ReadOptions,
    TokenPassthroughFactory,
)
from gateway.formats.model_format import AnswerStart
from gateway.generation.kv_params import KVTransferParams, apply_kv_params
from gateway.generation.request import OutputParserFactory, PromptRequest
from gateway.http.body import unknown_fields
from gateway.served_model import ServedModel
from protocol.engine.grammar import Grammar, check_grammar
from protocol.engine.sampling import SamplingParams, check_token_ids
from protocol.wire.errors import InvalidRequest
from protocol.worker.kv import KV_FIELD

SAMPLING = "sampling_params"
STRUCTURED = f"{SAMPLING}.structured_outputs"
BUDGET = f"{SAMPLING}.thinking_token_budget"
TAIL_TOKENS = 1 << 14
"""Number of the prompt's last tokens that are searched for an open reasoning block."""
_FIELD = re.compile(r"\w*")
"""Matches the field at the start of a path."""
_COPIED = tuple(
    set(SamplingParams.__struct_fields__) - {"seed", "bad_words", "logit_bias", "dry_breakers"}
)
"""Fields of SamplingParams that are copied from `sampling_params`."""


def to_request(
    body: GenerateBody, model: ServedModel, kv_params: KVTransferParams | None = None
) -> PromptRequest:
    """Return the prompt request of a body. `kv_params` are its checked `kv_transfer_params`."""
    prompt_request = PromptRequest(
        body.token_ids,
        choices_of(body.sampling_params, model),
        _parsers(body, model),
        grammar=grammar_of(body, model),
    )
    return apply_kv_params([prompt_request], kv_params, streams=bool(body.stream))[0]


def check(body: GenerateBody, max_n: int) -> None:
    """Raise InvalidRequest for an unsupported field, or for fields that exclude each other."""
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


def list_unknown_fields(fields: dict[str, Any]) -> list[str]:
    """Return the paths of the unknown fields of a body and of its `sampling_params`."""
    inner = unknown_fields(fields[SAMPLING], GenerateSampling)
    return [*unknown_fields(fields, GenerateBody), *(f"{SAMPLING}.{name}" for name in inner)]


def list_ignored_fields(
    unknown: list[str], body: GenerateBody, kv_params: KVTransferParams | None
) -> list[str]:
    """Return the fields without effect: `unknown` ones, unknown members of structured outputs, and
    `kv_transfer_params` if there is no transfer. Raise InvalidRequest if there are any and the body
    has strict_params."""
    form = structured_form(body.sampling_params.structured_outputs, STRUCTURED)
    ignored = [*unknown, *(form.ignored if form else ())]
    if kv_params is None and body.kv_transfer_params is not None:
        ignored.append(KV_FIELD)
    return ignored_fields(ignored, body.strict_params)


def namespace_of(body: GenerateBody) -> str:
    """Return the namespace of the prefix cache: the cache salt, or with skip_reading_prefix_cache
    a new random name, under which nothing is cached."""
    if body.sampling_params.skip_reading_prefix_cache:
        return uuid.uuid4().hex
    return body.cache_salt or ""


def request_path(name: str) -> str:
    """Return the path in the request for a field of SamplingParams or a token of the prompt."""
    field = _FIELD.match(name)[0]  # type: ignore[index]  # matches any text
    if field in SamplingParams.__struct_fields__ or field in GenerateSampling.__struct_fields__:
        return f"{SAMPLING}.{name}"
    return "token_ids" + name.removeprefix(field) if field == "prompt" else name


def engine_fields_of(body: GenerateBody) -> dict[str, str]:
    """Return the engine's names of fields -> their paths in the request."""
    return {"prompt": "token_ids", "grammar": "grammar" if body.grammar else STRUCTURED}


def choices_of(sampling: GenerateSampling, model: ServedModel) -> list[SamplingParams]:
    """Return the sampling parameters of each of the n choices. The model's defaults are not
    applied."""
    fields = {name: getattr(sampling, name) for name in _COPIED}
    fields = {name: value for name, value in fields.items() if value is not None}
    fields |= token_fields(sampling, model.tokenizer)
    try:
        return [
            SamplingParams(**fields, seed=nth_seed(sampling.seed, place))
            for place in range(sampling.n or 1)
        ]
    except ValueError as error:  # the message starts with the field's name
        field, _, problem = str(error).partition(": ")
        raise InvalidRequest.at(f"{SAMPLING}.{field}", problem) from None


def grammar_of(body: GenerateBody, model: ServedModel) -> Grammar | None:
    """Return the body's `grammar`, or else a grammar made from `structured_outputs` and the
    thinking budget. Return None if the body has none of them. Raise InvalidRequest if one is
    invalid, or if they exclude each other."""
    found = structured_form(body.sampling_params.structured_outputs, STRUCTURED)
    form = found.body if found else None
    max_thinking = body.sampling_params.thinking_token_budget
    limits = max_thinking is not None and max_thinking >= 0
    if body.grammar is not None:
        for field, is_there in ((STRUCTURED, form is not None), (BUDGET, limits)):
            if is_there:
                raise InvalidRequest.at(
                    field, "cannot be combined with grammar; set only one of them"
                )
        check_grammar(body.grammar)
        return body.grammar
    if form is None and not limits:
        return None
    start = _answer_start(body, model, calls=form is None)
    budget = start.budget(BUDGET, max_thinking) if limits and max_thinking is not None else None
    if form is None:
        return Grammar(budget=budget) if budget else None
    return _with_reasoning_ended(start, body.reasoning_ended).grammar(form, budget)


def _with_reasoning_ended(start: AnswerStart, ended: bool | None) -> AnswerStart:
    """Return `start`, changed to the request's `reasoning_ended`. If that is None, the end of the
    prompt decides, so return `start` unchanged."""
    return start if ended is None else msgspec.structs.replace(start, closed=ended)


def _answer_start(body: GenerateBody, model: ServedModel, *, calls: bool) -> AnswerStart:
    """Return the state in which the answer starts, which the end of the prompt shows. `calls` is
    whether the answer may have tool calls."""
    parser_kwargs = body.reasoning_parser_kwargs
    given: Mapping[str, Any] = (parser_kwargs.chat_template_kwargs if parser_kwargs else None) or {}
    check_token_ids(body.token_ids, model.card.vocab_size, "token_ids")
    tail = model.tokenizer.decode(body.token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return model.output_format.answer_start(tail, {**model.default_kwargs, **given}, calls=calls)


def _parsers(body: GenerateBody, model: ServedModel) -> OutputParserFactory:
    """Return the parser factory. Stop strings apply to all text. But if the prompt is a rendered
    chat (`reasoning_parser_kwargs` is set), they apply to content only, except in mode "text"."""
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
            continues_reasoning=start.thought,
            calls_or_text=grammar is not None and grammar.calls is not None,
        )
    return ParserFactory(model.tokenizer, msgspec.structs.replace(options, continues=False), answer)


def _invalid(field: str, why: str) -> InvalidRequest:
    return InvalidRequest.at(f"{SAMPLING}.{field}", f"{why}")
