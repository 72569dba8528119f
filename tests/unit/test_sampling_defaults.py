"""Sampling parameters of requests that set none: where they come from, and which win."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol import card_file
from protocol.config.gateway import GatewayConfig
from protocol.model_card import SamplingDefaults, sampling_defaults
from tests.unit.test_card import directory
from tools.__main__ import build_parser
from tools.commands.serve import Plan, plan
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE, DEFAULT
from tools.processes.topology import with_model
from worker.startup.card import main


def serve(*words: str) -> Plan:
    return plan(vars(build_parser().parse_args(["serve", *words])))


def test_the_stronger_defaults_win_one_by_one() -> None:
    strong = SamplingDefaults(temperature=0.0, presence_penalty=1.5)
    weak = SamplingDefaults(temperature=0.9, top_p=0.8)
    both = SamplingDefaults(temperature=0.0, top_p=0.8, presence_penalty=1.5)
    assert strong.with_fallback(weak) == both


def test_what_is_in_effect_is_complete() -> None:
    assert SamplingDefaults(temperature=0.2).effective_values() == {
        "temperature": 0.2,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def test_an_option_is_a_json_object_and_null_leaves_a_parameter_open() -> None:
    text = '{"temperature": 0.6, "top_k": 20, "min_p": null}'
    assert sampling_defaults(text) == SamplingDefaults(temperature=0.6, top_k=20)
    assert sampling_defaults("") == SamplingDefaults()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temperature=0.2", "not a JSON object"),
        ("[0.2]", "not a JSON object"),
        ('{"temperature": "low"}', "not a JSON object of numbers"),
        ('{"temprature": 0.2}', "'temprature' has no default here; known: temperature, top_p"),
        ('{"temperature": 9}', "temperature: Expected `float` <= 2.0"),
        ('{"top_k": 1.5}', "top_k: Expected `int`"),
    ],
)
def test_a_bad_option_is_a_usage_error_before_anything_starts(text: str, words: str) -> None:
    with pytest.raises(Failure) as caught:
        serve("--default-sampling", text)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(f"--default-sampling: {words}")


def test_the_default_model_comes_with_the_sampling_of_its_page() -> None:
    assert CATALOGUE[DEFAULT].sampling == SamplingDefaults(temperature=0.2, top_p=0.9)
    engine = with_model(serve().engine, Path("/m.gguf"))
    assert engine.worker.recommended_sampling == CATALOGUE[DEFAULT].sampling
    other = with_model(serve("/other.gguf").engine, Path("/other.gguf"))
    assert other.worker.recommended_sampling == SamplingDefaults()


def test_a_card_takes_the_recommendation_where_its_files_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    directory(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    said = '--recommended-sampling={"temperature": 0.2, "top_p": 0.9}'
    monkeypatch.setattr("sys.argv", ["card", str(folder), str(tmp_path / "card"), said])
    assert main() == 0
    card = card_file.read(tmp_path / "card").card
    assert card.defaults == SamplingDefaults(temperature=0.7, top_p=0.9)


def test_a_config_that_was_written_by_hand_is_checked_too() -> None:
    with pytest.raises(ValueError, match="default_sampling: temperature: "):
        GatewayConfig(default_sampling='{"temperature": -1}')
