"""The card of a model without weights, and its sampling defaults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.served_model import ModelOptions, fingerprint_of, version
from gateway.text.tokenizer import Tokenizer
from protocol.config.gateway import GatewayConfig
from protocol.engine.model_card import (
    CardFile,
    ModelCard,
    SamplingDefaults,
    read_card,
    sampling_defaults,
)
from tests.support.scripted_engine import EOS, byte_tokenizer, scripted_card
from tools.__main__ import build_parser
from tools.commands.serve import plan
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE, DEFAULT
from tools.models.preflight import log_sampling
from tools.processes.serve_plan import ServePlan
from tools.processes.topology import with_model
from tools.terminal import Terminal
from worker.errors import UnusableModel
from worker.startup.card import UNKNOWN_CONTEXT, main, text_card

SETTINGS: dict[str, Any] = {"eos_token": "<eos>", "chat_template": "{{ messages }}"}


def directory(folder: Path, settings: dict[str, Any] = SETTINGS, **config: Any) -> Path:
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_card_needs_only_a_tokenizer_and_its_config(tmp_path: Path) -> None:
    card = text_card(directory(tmp_path))
    assert (card.name, card.vocab_size, card.eos_token_ids) == (tmp_path.name, 259, [EOS])
    assert (card.chat_template, card.context_tokens) == ("{{ messages }}", UNKNOWN_CONTEXT)
    assert Tokenizer(card).encode("Hi", False) == list(b"Hi")


@pytest.mark.parametrize(("length", "context"), [(2048, 2048), (1e30, UNKNOWN_CONTEXT)])
def test_the_context_is_the_tokenizers_model_max_length(
    tmp_path: Path, length: float, context: int
) -> None:
    settings = SETTINGS | {"model_max_length": length}
    assert text_card(directory(tmp_path, settings)).context_tokens == context


def test_a_card_is_made_for_any_architecture_without_weights(tmp_path: Path) -> None:
    inner = {"vocab_size": 300, "max_position_embeddings": 77}
    card = text_card(directory(tmp_path, architectures=["NewForCausalLM"], text_config=inner))
    assert (card.architecture, card.vocab_size, card.context_tokens) == ("NewForCausalLM", 300, 77)


def test_the_vocabulary_size_is_the_models_even_if_the_tokenizer_has_more_tokens(
    tmp_path: Path,
) -> None:
    assert text_card(directory(tmp_path, vocab_size=257)).vocab_size == 257


def test_equal_files_have_an_equal_digest_and_others_do_not(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        directory(tmp_path / name)
    (tmp_path / "c" / "tokenizer.json").write_text(byte_tokenizer(["<x>"]).to_str())
    digests = [text_card(tmp_path / name).digest for name in ("a", "b", "c")]
    assert digests[0] == digests[1] != digests[2]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableModel, match=r"no tokenizer\.json"):
        text_card(tmp_path)


def test_a_card_file_holds_the_card_and_the_requested_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "card"
    model = tmp_path / "model"
    model.mkdir()
    directory(model)
    monkeypatch.setattr("sys.argv", ["card", str(model), str(file), "--max-len=99"])
    assert main() == 0
    assert read_card(file) == CardFile(card=text_card(model), max_len=99)
    shutil.rmtree(model)
    assert main() == 1
    assert "does not exist" in capsys.readouterr().err


def test_a_file_that_is_no_card_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\xff\x00")
    for name, message in (("odd", "is not a model card"), ("none", "cannot read")):
        with pytest.raises(ValueError, match=message):
            read_card(tmp_path / name)


# ---- sampling defaults
def serve(*words: str) -> ServePlan:
    return plan(vars(build_parser().parse_args(["serve", *words])))


def test_the_stronger_defaults_win_one_by_one() -> None:
    strong = SamplingDefaults(temperature=0.0, presence_penalty=1.5)
    weak = SamplingDefaults(temperature=0.9, top_p=0.8)
    both = SamplingDefaults(temperature=0.0, top_p=0.8, presence_penalty=1.5)
    assert strong.with_fallback(weak) == both


def test_effective_sampling_defaults_are_complete() -> None:
    assert SamplingDefaults(temperature=0.2).effective_values() == {
        "temperature": 0.2,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "logit_bias": {},
        "bad_words_ids": [],
    }


def test_a_default_that_no_request_could_set_is_left_out() -> None:
    valid: dict[str, Any] = {"top_k": 5, "logit_bias": {3: 1.0}}
    invalid: dict[str, Any] = {
        "temperature": 9.0,
        "top_p": 0.0,
        "repetition_penalty": float("inf"),
        "bad_words_ids": [[]],
    }
    assert SamplingDefaults(**valid, **invalid).checked() == (SamplingDefaults(**valid), invalid)


def test_an_option_is_a_json_object_and_null_leaves_a_parameter_open() -> None:
    text = '{"temperature": 0.6, "top_k": 20, "min_p": null}'
    assert sampling_defaults(text) == SamplingDefaults(temperature=0.6, top_k=20)
    text = '{"min_tokens": 2, "logit_bias": {"5": -1}, "bad_words_ids": []}'
    found = SamplingDefaults(min_tokens=2, logit_bias={5: -1.0}, bad_words_ids=[])
    assert sampling_defaults(text) == found
    assert found.with_fallback(SamplingDefaults(bad_words_ids=[[5]])) == found
    assert sampling_defaults("") == SamplingDefaults()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature=0.2", "not a JSON object"),
        ("[0.2]", "not a JSON object"),
        ('{"temperature": "low"}', "temperature: must be a number from 0 to 2; got the text"),
        ('{"bad_words_ids": [5]}', "bad_words_ids[0]: must be a list of 1 to 1,024 items; got 5"),
        ('{"logit_bias": {"5": 200}}', "logit_bias.5: must be a number from -100 to 100; got 200"),
        ('{"temprature": 0.2}', "'temprature' has no default here; known: temperature, top_p"),
        ('{"temperature": 9}', "temperature: must be a number from 0 to 2; got 9"),
        ('{"top_k": 1.5}', "top_k: must be a whole number from -1 to 16,777,216; got 1.5"),
    ],
)
def test_a_bad_option_is_a_usage_error_before_anything_starts(text: str, message: str) -> None:
    with pytest.raises(Failure) as caught:
        serve("--default-sampling", text)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(f"--default-sampling: {message}")


def test_the_default_model_has_recommended_sampling() -> None:
    assert CATALOGUE[DEFAULT].sampling == SamplingDefaults(
        temperature=0.2, top_p=0.9, frequency_penalty=0.5, presence_penalty=0.5
    )
    engine = with_model(serve().engine, Path("/m.gguf"))
    assert engine.worker.recommended_sampling == CATALOGUE[DEFAULT].sampling
    other = with_model(serve("/other.gguf").engine, Path("/other.gguf"))
    assert other.worker.recommended_sampling == SamplingDefaults()


def test_a_card_keeps_the_recommendation_apart_from_the_defaults_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    directory(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    option = '--recommended-sampling={"temperature": 0.2, "top_p": 0.9}'
    monkeypatch.setattr("sys.argv", ["card", str(folder), str(tmp_path / "card"), option])
    assert main() == 0
    card = read_card(tmp_path / "card").card
    assert card.defaults == SamplingDefaults(temperature=0.7)
    assert card.recommended == SamplingDefaults(temperature=0.2, top_p=0.9)


@pytest.mark.parametrize(
    ("option", "temperature", "is_free", "penalties"),
    [
        ("", None, True, (0.5, 0.25)),  # the catalogue's temperature
        ("", None, False, (None, None)),
        ("", 1.0, True, (0.5, 0.25)),
        ("", 0.0, True, (None, None)),
        ('{"temperature": 0}', None, True, (None, None)),
        ('{"temperature": 0}', 0.7, True, (0.5, 0.25)),
        ('{"frequency_penalty": 0.1}', 0.0, True, (0.1, None)),
        ('{"frequency_penalty": 0.1}', 1.0, False, (0.1, None)),
        ('{"frequency_penalty": 0.1}', 1.0, True, (0.1, None)),
    ],
)
def test_recommended_penalties_are_not_for_greedy_requests_and_forms(
    option: str,
    temperature: float | None,
    is_free: bool,
    penalties: tuple[float | None, float | None],
) -> None:
    recommended = SamplingDefaults(temperature=0.2, frequency_penalty=0.5, presence_penalty=0.25)
    options = ModelOptions([], None, {}, "auto", "auto", sampling_defaults(option))
    card = scripted_card(defaults=SamplingDefaults(top_k=40), recommended=recommended)
    defaults = options.defaults_of(card)
    found = defaults.for_request(temperature, is_free=is_free)
    assert (found.frequency_penalty, found.presence_penalty) == penalties
    assert found.top_k == 40
    assert found.temperature == (0.0 if "temperature" in option else 0.2)
    own = defaults.for_request(temperature, is_free=is_free, sets_penalty=True)
    assert own == defaults.for_request(0.0)


@pytest.mark.parametrize(
    ("card", "option", "is_logged"),
    [
        (scripted_card(defaults=SamplingDefaults()), "", True),
        (scripted_card(defaults=SamplingDefaults()), '{"temperature": 0.5}', False),
        (scripted_card(defaults=SamplingDefaults(top_k=40)), "", False),
        (
            scripted_card(defaults=SamplingDefaults(), recommended=SamplingDefaults(top_p=0.9)),
            "",
            False,
        ),
        (scripted_card(defaults=SamplingDefaults(), generates=False), "", False),
    ],
)
def test_a_start_says_if_no_sampling_is_recommended(
    card: ModelCard, option: str, is_logged: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    log_sampling(card, option, Terminal())
    assert ("no recommended sampling is known" in capfd.readouterr().out) == is_logged


def test_a_config_that_was_written_by_hand_is_checked_too() -> None:
    with pytest.raises(ValueError, match="default_sampling: temperature: "):
        GatewayConfig(default_sampling='{"temperature": -1}')


def test_a_fingerprint_names_the_version_the_weights_and_what_bits_depend_on(
    tmp_path: Path,
) -> None:
    card = replace(text_card(directory(tmp_path)), digest="0123456789abcdef")
    plain = fingerprint_of(card)
    assert plain == f"tidegate-{version()}-01234567"
    assert fingerprint_of(replace(card, numerics="0f1e2d3c")) == plain + "-0f1e2d3c"
