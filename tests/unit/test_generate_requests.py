"""Requests of the token endpoint: their fields, the prompt requests they become, and refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.api.openai.field_paths import translate_errors
from gateway.api.tokens import prepare
from gateway.api.tokens.requests import GenerateBody
from gateway.formats.choice_parser import ParserFactory, TokenPassthroughFactory
from gateway.generation.kv_params import parse_kv_params
from gateway.http.body import convert, decode
from protocol.engine.grammar import ChoiceGrammar, Grammar, Regex, Thinking
from protocol.engine.sampling import SamplingParams
from protocol.wire.errors import InvalidRequest
from tests.support.scripted_engine import ids_of, marked_ids, scripted_card, thinking_card
from tests.support.served import LIMITS, served

PLAIN, THINKER = served(scripted_card()), served(thinking_card())
FORM = {"regex": "[ab]"}


def request(
    sampling: dict[str, Any] | None = None, **fields: Any
) -> tuple[dict[str, Any], GenerateBody]:
    data: dict[str, Any] = {"token_ids": [72, 105], "sampling_params": sampling or {}, **fields}
    return data, convert(data, GenerateBody)


def ignored(data: dict[str, Any], body: GenerateBody) -> list[str]:
    kv_params = parse_kv_params(body.kv_transfer_params, LIMITS)
    return prepare.list_ignored_fields(prepare.list_unknown_fields(data), body, kv_params)


def body_of(sampling: dict[str, Any] | None = None, **fields: Any) -> GenerateBody:
    return request(sampling, **fields)[1]


def check_all(sampling: dict[str, Any], fields: dict[str, Any]) -> None:
    """Run all checks of a request."""
    data, body = request(sampling, **fields)
    prepare.check(body, max_n=8)
    ignored(data, body)
    prepare.to_request(body, THINKER)


def test_absent_parameters_are_neutral_whatever_the_models_defaults() -> None:
    assert PLAIN.defaults.usual.temperature == 0.7
    assert prepare.to_request(body_of(), PLAIN).choices == [SamplingParams()]


def test_given_parameters_are_sent_to_the_engine() -> None:
    fields: dict[str, Any] = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 40,
        "min_p": 0.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "stop_token_ids": [11],
        "ignore_eos": True,
        "logit_bias": {"5": -1.5},
        "logprobs": 2,
        "logprobs_of": "both",
        "prompt_logprobs": 1,
        "allowed_token_ids": [15, 16],
        "logprob_token_ids": [17],
        "typical_p": 0.5,
        "top_n_sigma": 1.5,
        "dynatemp_range": 0.25,
        "dynatemp_exponent": 2.0,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "mirostat": 2,
        "mirostat_tau": 3.0,
        "mirostat_eta": 0.25,
        "dry_multiplier": 0.5,
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 64,
        "samplers": ["penalties", "dry", "min_p", "temperature"],
    }
    assert {*fields, "seed", "bad_words", "dry_breakers"} == set(SamplingParams.__struct_fields__)
    sampling = {**fields, "n": 2, "seed": 9, "bad_words": ["b"], "dry_sequence_breakers": [":"]}
    params = SamplingParams(
        **(fields | {"logit_bias": {5: -1.5}}),
        bad_words=[ids_of("b"), ids_of(" b")],
        dry_breakers=list(PLAIN.tokenizer.breakers((":",))),
    )
    ask = prepare.to_request(body_of(sampling), PLAIN)
    assert ask.prompt_ids == [72, 105]
    assert ask.choices == [msgspec.structs.replace(params, seed=seed) for seed in (9, 10)]


@pytest.mark.parametrize(
    ("param", "sampling", "fields"),
    [
        ("sampling_params.n", {"n": 9}, {}),
        ("sampling_params.stop", {"stop": ""}, {}),
        ("sampling_params.max_tokens", {"min_tokens": 5, "max_tokens": 2}, {}),
        ("sampling_params.logprob_token_ids", {"logprob_token_ids": [1]}, {}),
        ("sampling_params.logprobs_of", {"logprobs_of": "both"}, {}),
        (
            "sampling_params.logprobs_of",
            {"logprobs_of": "sampling", "logprobs": 1, "temperature": 0},
            {},
        ),
        ("sampling_params.prompt_logprobs", {"prompt_logprobs": 1}, {"stream": True}),
        ("sampling_params.stop", {"detokenize": False, "stop": ["x"]}, {}),
        ("output_mode", {"detokenize": False}, {"output_mode": "text"}),
        ("sampling_params.trace_decode_token_ids", {"trace_decode_token_ids": []}, {}),
        ("sampling_params.repetition_detection", {"repetition_detection": {}}, {}),
        ("features", {}, {"features": {}}),
        ("content_parts", {}, {"content_parts": []}),
        ("ec_transfer_params", {}, {"ec_transfer_params": {}}),
        ("token_ids", {}, {"token_ids": []}),
        ("token_ids[1]", {}, {"token_ids": [1, -1]}),
        ("request_id", {}, {"request_id": "a b"}),
        ("reasoning_parser_kwargs.other", {}, {"reasoning_parser_kwargs": {"other": 1}}),
        ("mood", {}, {"mood": 1, "strict_params": True}),
        ("sampling_params.mood", {"mood": 1}, {"strict_params": True}),
        ("kv_transfer_params", {}, {"kv_transfer_params": {}, "strict_params": True}),
        ("sampling_params.structured_outputs.rexeg", {"structured_outputs": {"rexeg": "a"}}, {}),
        ("sampling_params.structured_outputs", {"structured_outputs": FORM}, {"grammar": {}}),
        ("sampling_params.thinking_token_budget", {"thinking_token_budget": 1}, {"grammar": {}}),
        ("grammar", {}, {"grammar": {}}),
        ("grammar.body.kind", {}, {"grammar": {"body": {"kind": "riddle"}}}),
        ("token_ids[1]", {"structured_outputs": FORM}, {"token_ids": [1, 1 << 30]}),
    ],
)
def test_an_invalid_field_is_refused_by_name(
    param: str, sampling: dict[str, Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_all(sampling, fields)
    assert caught.value.param == param
    assert param.split(".")[-1] in caught.value.message


def test_a_body_without_sampling_params_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="sampling_params: this field is required"):
        decode(b'{"token_ids": [1]}', GenerateBody)


def test_unsupported_fields_of_vllm_with_a_neutral_value_are_accepted() -> None:
    idle: dict[str, Any] = {
        "watermarking": None,
        "extra_args": {},
        "flat_logprobs": False,
        "routed_experts_prompt_start": 0,
        "stream_interval": 1,
        "output_kind": 2,
        "spaces_between_special_tokens": True,
        "thinking_token_budget": -1,
    }
    data, body = request(idle, features=None, token_offsets=[[0, 1]])
    prepare.check(body, max_n=8)
    assert ignored(data, body) == []
    assert prepare.grammar_of(body, THINKER) is None


def test_fields_without_effect_are_listed_by_their_path() -> None:
    data, body = request({"mood": 1}, mood=2, kv_transfer_params={"do_remote_decode": True})
    assert ignored(data, body) == ["mood", "sampling_params.mood", "kv_transfer_params"]


def test_text_is_parsed_only_if_the_request_needs_it() -> None:
    assert isinstance(
        prepare.to_request(body_of({"logprobs": 3}), PLAIN).parser_factory, TokenPassthroughFactory
    )
    for body in (body_of({"stop": ["x"]}), body_of(output_mode="text")):
        assert isinstance(prepare.to_request(body, PLAIN).parser_factory, ParserFactory)


def grammar(prompt: str = "", sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    body = body_of(
        {"structured_outputs": FORM} if sampling is None else sampling,
        **({"token_ids": marked_ids("say" + prompt)} | fields),
    )
    return prepare.grammar_of(body, THINKER)


BODY = Regex(pattern="[ab]")
MAY_THINK = Thinking(opens="<think>", closes="</think>", optional=True)
THINKS = Thinking(opens="<think>", closes="</think>", inside=True)


def test_the_end_of_the_prompt_decides_whether_reasoning_may_precede_the_form() -> None:
    assert grammar() == Grammar(body=BODY, thinking=MAY_THINK)
    assert grammar("<think>hm") == Grammar(body=BODY, thinking=THINKS)
    assert grammar("<think>hm</think>") == Grammar(body=BODY)


def test_reasoning_ended_takes_precedence_over_the_end_of_the_prompt() -> None:
    assert grammar("<think>hm", reasoning_ended=True) == Grammar(body=BODY)
    found = grammar("<think>hm</think>", reasoning_ended=False)
    assert found == Grammar(body=BODY, thinking=MAY_THINK)


def test_the_form_starts_at_once_if_the_model_has_no_reasoning() -> None:
    body = body_of({"structured_outputs": FORM}, reasoning_ended=False)
    assert prepare.grammar_of(body, PLAIN) == Grammar(body=BODY)


def test_a_complete_grammar_is_used_unchanged() -> None:
    expected = Grammar(body=ChoiceGrammar(choices=["a"]), thinking=MAY_THINK, before="<")
    body = body_of(grammar=msgspec.to_builtins(expected))
    assert prepare.grammar_of(body, THINKER) == expected


def test_a_thinking_budget_works_with_and_without_a_form() -> None:
    alone = grammar("<think>", {"thinking_token_budget": 3})
    assert (alone.body, alone.budget.most, alone.budget.inside) == (None, 3, True)
    both = grammar("<think>", {"thinking_token_budget": 3, "structured_outputs": FORM})
    assert (both.body, both.thinking, both.budget) == (BODY, THINKS, alone.budget)


def param_of(name: str, body: GenerateBody) -> str | None:
    """Return the field that an error names, if the engine's error names the field `name`."""
    with (
        pytest.raises(InvalidRequest) as raised,
        translate_errors(prepare.request_path, prepare.engine_fields_of(body)),
    ):
        raise InvalidRequest("no", param=name)
    return raised.value.param


def test_the_engines_field_names_become_paths_in_the_request() -> None:
    body = body_of({"structured_outputs": FORM})
    found = {
        name: param_of(name, body)
        for name in (
            *("prompt", "prompt[3]", "stop_token_ids[3]", "logit_bias.500"),
            *("grammar", "max_tokens", "model"),
        )
    }
    assert found == {
        "prompt": "token_ids",
        "prompt[3]": "token_ids[3]",
        "stop_token_ids[3]": "sampling_params.stop_token_ids[3]",
        "logit_bias.500": "sampling_params.logit_bias.500",
        "grammar": "sampling_params.structured_outputs",
        "max_tokens": "sampling_params.max_tokens",
        "model": "model",
    }
    own = body_of(grammar={"body": {"kind": "json_object"}})
    assert param_of("grammar", own) == "grammar"


def test_skip_reading_prefix_cache_uses_a_new_namespace() -> None:
    assert prepare.namespace_of(body_of(cache_salt="x")) == "x"
    spaces = {prepare.namespace_of(body_of({"skip_reading_prefix_cache": True})) for _ in range(3)}
    assert len(spaces - {""}) == 3
