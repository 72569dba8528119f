"""generation_config.json: each key of transformers is applied, has no effect, or is named."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from transformers import GenerationConfig

from protocol.engine.model_card import SamplingDefaults
from worker.checkpoint.generation_config import (
    APPLIED,
    KNOWN,
    NAMED,
    NO_EFFECT,
    generation_defaults,
)
from worker.checkpoint.gguf_tokenizer import gguf_text
from worker.errors import UnusableModel
from worker.spec.fields import Fields

VOCAB = 100
APPLIED_VALUES: dict[str, tuple[Any, SamplingDefaults]] = {
    "temperature": (0.6, SamplingDefaults(temperature=0.6)),
    "top_k": (20, SamplingDefaults(top_k=20)),
    "top_p": (0.95, SamplingDefaults(top_p=0.95)),
    "min_p": (0.1, SamplingDefaults(min_p=0.1)),
    "repetition_penalty": (1.05, SamplingDefaults(repetition_penalty=1.05)),
    "do_sample": (False, SamplingDefaults(temperature=0.0)),
    "min_new_tokens": (5, SamplingDefaults(min_tokens=5)),
    "bad_words_ids": ([[7], [8, 9]], SamplingDefaults(bad_words_ids=[[7], [8, 9]])),
    "suppress_tokens": ([3, 4], SamplingDefaults(bad_words_ids=[[3], [4]])),
    "sequence_bias": ([[[5], -2.5]], SamplingDefaults(logit_bias={5: -2.5})),
    "eos_token_id": ([2, 3], SamplingDefaults()),  # TextFacts.eos_token_ids
}
"""Key -> a value, and the defaults that it makes."""
NAMED_VALUES: dict[str, Any] = {
    "assistant_ensemble_weight": 0.5,
    "begin_suppress_tokens": [5],
    "constraints": [{}],
    "dola_layers": "high",
    "encoder_no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.2,
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 3e-4,
    "exponential_decay_length_penalty": [10, 1.1],
    "force_words_ids": [[5]],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 2,
    "guidance_scale": 1.5,
    "min_length": 10,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "penalty_alpha": 0.6,
    "stop_strings": ["User:"],
    "token_healing": True,
    "top_h": 0.4,
    "typical_p": 0.9,
    "watermarking_config": {"bias": 2.0},
}
"""Key -> a value that would change answers."""
NOT_APPLIED = "generation_config.json: not applied: "


def read(values: dict[str, Any]) -> SamplingDefaults:
    return generation_defaults(values, VOCAB)


def named(caplog: pytest.LogCaptureFixture, values: dict[str, Any]) -> str:
    """Return what the log line about a file names; "" if there is none."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        read(values)
    assert len(caplog.messages) <= 1
    message = caplog.messages[0] if caplog.messages else NOT_APPLIED
    assert message.startswith(NOT_APPLIED)
    return message.removeprefix(NOT_APPLIED)


def test_each_key_of_transformers_is_in_one_table() -> None:
    assert sorted([*APPLIED, *NO_EFFECT, *NAMED]) == sorted(KNOWN)
    assert vars(GenerationConfig()).keys() - KNOWN == set()
    assert APPLIED_VALUES.keys() == APPLIED
    assert NAMED_VALUES.keys() == NAMED.keys()


@pytest.mark.parametrize("key", APPLIED_VALUES)
def test_a_key_that_is_applied_makes_a_default(key: str, caplog: pytest.LogCaptureFixture) -> None:
    value, defaults = APPLIED_VALUES[key]
    assert read({key: value}) == defaults
    assert named(caplog, {key: value}) == ""
    assert read({key: None}) == SamplingDefaults()


@pytest.mark.parametrize("key", NO_EFFECT)
def test_a_key_without_an_effect_is_not_named(key: str, caplog: pytest.LogCaptureFixture) -> None:
    for value in (None, 3, True, "x", [5]):
        assert read({key: value}) == SamplingDefaults()
        assert named(caplog, {key: value}) == ""


@pytest.mark.parametrize("key", NAMED)
def test_a_key_that_is_not_applied_is_named_with_its_value(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read({key: NAMED_VALUES[key]}) == SamplingDefaults()
    assert named(caplog, {key: NAMED_VALUES[key]}) == f"{key} {NAMED_VALUES[key]!r}"
    for neutral in (None, *NAMED[key]):
        assert named(caplog, {key: neutral}) == ""


def test_everything_that_is_not_applied_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    values = {
        "do_sample": True,
        "no_repeat_ngram_size": 3,
        "top_p": 1.2,
        "repetition_penalty": 0,
        "min_new_tokens": -1,
        "sequence_bias": [[[5], 101.0], [[6, 7], 2.0]],
        "chat_format": "chatml",
    }
    assert named(caplog, values) == (
        "top_p 1.2 (out of bounds), repetition_penalty 0.0 (out of bounds), "
        "min_new_tokens -1 (out of bounds), sequence_bias {5: 101.0} (out of bounds), "
        "no_repeat_ngram_size 3, sequence_bias of several tokens, chat_format (unknown)"
    )
    assert read(values) == SamplingDefaults()


def test_a_file_that_does_not_sample_is_greedy_whatever_its_temperature() -> None:
    usual = {"temperature": 0.6, "top_p": 0.95}
    assert read(usual | {"do_sample": False}) == SamplingDefaults(temperature=0.0, top_p=0.95)
    for sampled in (usual, usual | {"do_sample": True}, usual | {"do_sample": None}):
        assert read(sampled) == SamplingDefaults(temperature=0.6, top_p=0.95)


def test_sequences_that_cannot_occur_and_lone_end_tokens_are_no_bad_words() -> None:
    found = read(
        {
            "eos_token_id": [2, 3],
            "bad_words_ids": [[2], [2, 3], [5, 100], [7], [7]],
            "suppress_tokens": [-1, 7, 99, 100],
            "sequence_bias": [[[8, 9], float("-inf")], [[100], 1.0]],
        }
    )
    assert found == SamplingDefaults(bad_words_ids=[[8, 9], [2, 3], [7], [99]])
    unknown = generation_defaults({"suppress_tokens": [100]}, None)
    assert unknown == SamplingDefaults(bad_words_ids=[[100]])


def test_too_many_bad_words_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = generation_defaults({"suppress_tokens": list(range(300)), "top_k": 5}, None)
    assert found == SamplingDefaults(top_k=5)
    (message,) = caplog.messages
    assert message.startswith(f"{NOT_APPLIED}bad_words_ids [[0], [1], ")
    assert message.endswith(" (out of bounds)")


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "0.6"},
        {"top_k": 1.5},
        {"do_sample": "no"},
        {"min_new_tokens": [5]},
        {"suppress_tokens": 5},
        {"suppress_tokens": ["a"]},
        {"bad_words_ids": [5]},
        {"bad_words_ids": [[]]},
        {"sequence_bias": [[5, 1.0]]},
        {"sequence_bias": [[[5]]]},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(UnusableModel, match=next(iter(values))):
        read(values)


def test_the_parameters_of_a_gguf_file_are_checked_too(caplog: pytest.LogCaptureFixture) -> None:
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.token_type": [1, 1],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.suppress_tokens": [1, 2],
        "general.sampling.temp": 0.5,
        "general.sampling.top_p": 0.0,
        "general.sampling.mirostat": 2,
        "general.sampling.mirostat_tau": 5.0,
        "general.sampling.xtc_probability": 0.0,
    }
    with caplog.at_level(logging.INFO):
        found = gguf_text(Fields(values, "file.gguf"), 2).defaults
    assert found == SamplingDefaults(temperature=0.5, bad_words_ids=[[1]])
    assert caplog.messages == [
        "the GGUF file's sampling parameters: not applied: top_p 0.0 (out of bounds), mirostat"
    ]
