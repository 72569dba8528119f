"""Request fields become the sampling parameters that the engine receives."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from gateway.api.openai import requests
from gateway.api.openai.checks import check_batch, check_chat
from gateway.api.openai.field_paths import ignored_fields
from gateway.api.openai.parameters import choices_of, read_options, token_fields
from gateway.api.tokens.requests import GenerateBody, GenerateSampling
from gateway.http.body import decode
from gateway.text.tokenizer import Tokenizer
from protocol.engine.model_card import SamplingDefaults
from protocol.engine.sampling import DryBreaker, SamplingParams
from protocol.wire.errors import InvalidRequest
from tests.support.scripted_engine import scripted_card

HI = [{"role": "user", "content": "hi"}]
SILENT_MODEL = SamplingDefaults()


def chat_body(**fields: Any) -> requests.ChatBody:
    return decode(msgspec.json.encode({"messages": HI, **fields}), requests.ChatBody)


def text_body(**fields: Any) -> requests.CompletionBody:
    return decode(msgspec.json.encode({"prompt": "x", **fields}), requests.CompletionBody)


@pytest.mark.parametrize(
    "kind", [requests.ChatBody, requests.CompletionBody, GenerateBody, GenerateSampling]
)
def test_every_optional_field_may_be_null(kind: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(kind):
        if field.default is not msgspec.NODEFAULT:
            assert field.default is None
            assert field.type is Any or type(None) in get_args(field.type), field.name


def without_none(annotation: Any) -> Any:
    """Return X for the annotation X | None."""
    members = get_args(annotation)
    return members[0] if type(None) in members else annotation


@pytest.mark.parametrize(
    ("kind", "absent"),
    [
        (requests.CompletionBody, {"logprobs_of", "dry_breakers"}),
        (GenerateSampling, {"dry_breakers"}),
    ],
)
def test_sampling_fields_are_bounded_as_the_engine_bounds_them(
    kind: type[msgspec.Struct], absent: set[str]
) -> None:
    ours = get_type_hints(kind, include_extras=True)
    theirs = get_type_hints(SamplingParams, include_extras=True)
    assert set(theirs) - set(ours) == absent
    for name in set(theirs) - absent - {"bad_words", "logit_bias"}:  # also texts here
        assert without_none(ours[name]) == without_none(theirs[name]), name


def test_samplers_of_llama_cpp_are_sent_to_the_engine() -> None:
    fields: dict[str, Any] = {
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
        "samplers": ["dry", "xtc", "temperature"],
    }
    assert choices_of(chat_body(**fields), SILENT_MODEL) == [SamplingParams(**fields)]


def test_pairs_of_logit_bias_add_up_and_false_bans_the_token() -> None:
    tokenizer = Tokenizer(scripted_card())
    (a, b), (c,) = tokenizer.encode("ab", False), tokenizer.encode("c", False)
    pairs = [[a, 1.5], ["ab", 2], ["c", False], [b, False]]
    (params,) = choices_of(chat_body(logit_bias=pairs), SILENT_MODEL, tokenizer)
    assert params.logit_bias == {a: 3.5, b: 2.0}
    assert params.bad_words == [[c], [b]]


@pytest.mark.parametrize(
    ("pairs", "param"), [([[5, True]], "logit_bias[0][1]"), ([[5, 60], [5, 60]], "logit_bias")]
)
def test_a_wrong_pair_of_logit_bias_is_refused(pairs: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        choices_of(chat_body(logit_bias=pairs), SILENT_MODEL, Tokenizer(scripted_card()))
    assert refusal.value.param == param


BANS: list[Any] = [[token_id, False] for token_id in range(256)]
OTHER_BANS: list[Any] = [[token_id, False] for token_id in range(1_000, 1_256)]
BIASES: list[Any] = [[token_id, 1] for token_id in range(1_000, 2_023)]


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"logit_bias": [*BIASES, ["ab", 1]]}, "logit_bias", "more than 1,024 tokens have a bias"),
        ({"logit_bias": [*BANS, [256, False]]}, "logit_bias", "more than 256 tokens are banned"),
        ({"logit_bias": BANS, "bad_words": ["ab"]}, "logit_bias", "256 tokens that it bans"),
        ({"logit_bias": [["a" * 1024, 0.01]] * 17}, "logit_bias", "17,408 characters together"),
        ({"bad_words": ["a" * 400, "b" * 400]}, "bad_words", "more than 1,024 tokens together"),
        ({"bad_words": ["a" * 1024] * 17}, "bad_words", "17,408 characters together"),
    ],
)
def test_texts_of_more_tokens_than_the_engine_accepts_are_refused(
    fields: dict[str, Any], param: str, problem: str
) -> None:
    tokenizer = Tokenizer(scripted_card())
    with pytest.raises(InvalidRequest, match=problem) as refusal:
        choices_of(chat_body(**fields), SILENT_MODEL, tokenizer)
    assert refusal.value.param == param
    with pytest.raises(InvalidRequest, match=problem) as refusal:
        token_fields(msgspec.convert(fields, GenerateSampling), tokenizer)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": [*OTHER_BANS, *([text, False] for text in "abcde" * 9)]},
        {"bad_words": [f"{number}" * 40 for number in range(10, 100)]},
    ],
)
def test_texts_after_too_many_tokens_are_not_encoded(fields: dict[str, Any]) -> None:
    encoded: list[str] = []

    class ListingTokenizer(Tokenizer):
        def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
            encoded.append(text)
            return super().encode(text, *args, **options)

    tokenizer = ListingTokenizer(scripted_card())
    with pytest.raises(InvalidRequest, match="more than"):
        choices_of(chat_body(**fields), SILENT_MODEL, tokenizer)
    assert 0 < len(encoded) < 20


def test_as_many_tokens_as_the_engine_accepts_are_sent() -> None:
    fields: dict[str, Any] = {"logit_bias": [*BIASES[1:], ["ab", 1]]}
    (params,) = choices_of(chat_body(**fields), SILENT_MODEL, Tokenizer(scripted_card()))
    assert len(params.logit_bias) == 1_024
    fields = {"logit_bias": [*BANS], "bad_words": [" "]}  # one of the banned tokens
    (params,) = choices_of(chat_body(**fields), SILENT_MODEL, Tokenizer(scripted_card()))
    assert len(params.bad_words) == 256


def test_half_a_character_is_no_breaker() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Tokenizer(scripted_card()).breakers(("a", "\ud800"))
    assert refusal.value.param == "dry_sequence_breakers[1]"


def test_dry_has_the_usual_breakers_unless_the_request_gives_some() -> None:
    tokenizer = Tokenizer(scripted_card())

    def breakers(**fields: Any) -> list[DryBreaker]:
        (params,) = choices_of(chat_body(**fields), SILENT_MODEL, tokenizer)
        return params.dry_breakers

    assert breakers() == breakers(dry_sequence_breakers=["x"]) == []
    assert breakers(dry_multiplier=1, dry_sequence_breakers=[]) == []
    assert breakers(dry_multiplier=1) == list(tokenizer.breakers(("\n", ":", '"', "*")))
    (one,) = breakers(dry_multiplier=1, dry_sequence_breakers=["x"])
    assert tokenizer.encode("x", False)[0] in one.heads


def test_absent_fields_get_the_defaults_of_the_api() -> None:
    assert choices_of(chat_body(), SILENT_MODEL) == [SamplingParams()]
    assert choices_of(text_body(), SILENT_MODEL) == [SamplingParams(max_tokens=16)]


def test_the_request_takes_precedence_over_the_model_and_the_model_over_the_api() -> None:
    model = SamplingDefaults(
        temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1
    )
    (params,) = choices_of(chat_body(temperature=0, top_k=-1), model)
    assert (params.temperature, params.top_k) == (0, -1)
    assert (params.top_p, params.min_p, params.repetition_penalty) == (0.9, 0.1, 1.1)


def test_the_model_may_have_a_fewest_tokens_and_biases_by_default() -> None:
    model = SamplingDefaults(min_tokens=20, logit_bias={5: -2.0})
    (params,) = choices_of(chat_body(), model)
    assert (params.min_tokens, params.logit_bias) == (20, {5: -2.0})
    (params,) = choices_of(chat_body(min_tokens=3, logit_bias={"7": 1}), model)
    assert (params.min_tokens, params.logit_bias) == (3, {7: 1.0})
    (params,) = choices_of(chat_body(min_tokens=0, logit_bias={}), model)
    assert (params.min_tokens, params.logit_bias) == (0, {})


def test_an_answer_may_be_shorter_than_the_models_fewest_tokens_if_the_request_says_so() -> None:
    model = SamplingDefaults(min_tokens=20)
    for body in (chat_body(max_tokens=8), text_body(max_tokens=8)):
        (params,) = choices_of(body, model)
        assert (params.max_tokens, params.min_tokens) == (8, 8)
    (params,) = choices_of(text_body(max_tokens=0, prompt_logprobs=1), model)
    assert params.min_tokens == 0


def test_a_requests_bad_words_are_added_to_those_of_the_model() -> None:
    model = SamplingDefaults(bad_words_ids=[[5], [104, 105]])
    tokenizer = Tokenizer(scripted_card())
    (params,) = choices_of(chat_body(), model, tokenizer)
    assert params.bad_words == [[5], [104, 105]]
    (params,) = choices_of(chat_body(bad_words=["hi"]), model, tokenizer)
    assert params.bad_words == [[104, 105], [32, 104, 105], [5]]
    many = SamplingDefaults(bad_words_ids=[[token] for token in range(255)])
    with pytest.raises(InvalidRequest, match="bad_words: 2 token sequences, and the 255"):
        choices_of(chat_body(bad_words=["hi"]), many, tokenizer)


def test_each_choice_has_the_next_seed() -> None:
    seeds = [params.seed for params in choices_of(chat_body(n=3, seed=7), SILENT_MODEL)]
    assert seeds == [7, 8, 9]
    last = (1 << 63) - 1
    assert [p.seed for p in choices_of(chat_body(n=2, seed=last), SILENT_MODEL)] == [
        last,
        -(1 << 63),
    ]
    for body in (chat_body(n=2), chat_body(n=2, seed=-1)):
        assert [params.seed for params in choices_of(body, SILENT_MODEL)] == [None, None]


def test_max_completion_tokens_takes_precedence_over_max_tokens() -> None:
    body = chat_body(max_tokens=5, max_completion_tokens=6)
    assert choices_of(body, SILENT_MODEL)[0].max_tokens == 6


def test_each_route_has_its_own_logprobs_fields() -> None:
    def num_logprobs(
        body: requests.ChatBody | requests.CompletionBody,
    ) -> tuple[int | None, int | None]:
        params = choices_of(body, SILENT_MODEL)[0]
        return params.logprobs, params.prompt_logprobs

    assert num_logprobs(chat_body()) == (None, None)
    assert num_logprobs(chat_body(logprobs=True)) == (0, None)
    assert num_logprobs(chat_body(logprobs=True, top_logprobs=4)) == (4, None)
    assert num_logprobs(chat_body(logprobs=False)) == (None, None)
    assert num_logprobs(text_body(logprobs=3)) == (3, None)
    assert num_logprobs(text_body(logprobs=3, echo=True)) == (3, 3)
    assert num_logprobs(text_body(echo=True)) == (None, None)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_one_or_many_texts_or_lists_of_ids(prompt: Any, prompts: Any) -> None:
    assert requests.prompts_of(text_body(prompt=prompt), 2) == prompts


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]], ["a", [1]], ["a"] * 3])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        requests.prompts_of(text_body(prompt=prompt), 2)
    assert caught.value.param == "prompt"


def test_contradicting_limits_name_the_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        choices_of(chat_body(min_tokens=9, max_tokens=8), SILENT_MODEL)
    assert caught.value.param == "max_tokens"


def test_an_unsupported_field_is_refused_unless_its_value_is_neutral() -> None:
    check_chat(chat_body(response_format={"type": "text"}, tool_choice="auto", tools=[]))
    check_chat(chat_body(modalities=["text"], functions=[], best_of=2, n=2))
    check_chat(chat_body(thinking_token_budget=100, thinking={"type": "enabled"}))
    for field, value in {
        "functions": [{"name": "f"}],
        "modalities": ["text", "audio"],
        "best_of": 3,
    }.items():
        with pytest.raises(InvalidRequest, match="not supported") as caught:
            check_chat(chat_body(**{field: value}))
        assert caught.value.param == field
    for field, member in (("thinking", "display"), ("reasoning", "summary")):
        with pytest.raises(InvalidRequest, match="not supported") as caught:
            check_chat(chat_body(**{field: {member: 5}}))
        assert caught.value.param == f"{field}.{member}"


def test_a_batch_is_bounded_and_not_streamed() -> None:
    def body(**fields: Any) -> requests.BatchBody:
        data = msgspec.json.encode({"messages": [HI, HI], **fields})
        return decode(data, requests.BatchBody)

    check_batch(body(), 2)
    for limit, fields, param in ((1, {}, "messages"), (2, {"stream": True}, "stream")):
        with pytest.raises(InvalidRequest) as caught:
            check_batch(body(**fields), limit)
        assert caught.value.param == param


def test_unknown_fields_are_refused_only_with_strict_params() -> None:
    assert ignored_fields(["max_tokenz", "user", "max_tokenz"], None) == [
        "max_tokenz",
        "user",
    ]
    assert ignored_fields([], True) == []
    with pytest.raises(InvalidRequest, match="max_tokenz, metadata") as caught:
        ignored_fields(["max_tokenz", "metadata"], True)
    assert caught.value.param == "max_tokenz"


def test_the_read_options_are_those_of_the_request() -> None:
    body = chat_body(stop=["a", "b"], include_stop_str_in_output=True, skip_special_tokens=False)
    options = read_options(body, SamplingParams(min_tokens=3), continues=False)
    assert options.stop == ["a", "b"]
    assert options.include_stop
    assert options.min_tokens == 3
    assert not options.skip_special_tokens
    plain = read_options(text_body(stop="x"), SamplingParams(), continues=True)
    assert plain.stop == ["x"]
    assert plain.skip_special_tokens
    assert plain.continues
