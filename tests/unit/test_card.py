"""The card of a model that nobody here computes: whatever of its files there are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.text.tokenizer import Tokenizer
from protocol import card_file
from protocol.card_file import CardFile
from tests.support.scripted_engine import EOS, byte_tokenizer
from worker.loading.errors import UnusableModel
from worker.startup.card import UNKNOWN_CONTEXT, main, text_card

SETTINGS: dict[str, Any] = {"eos_token": "<eos>", "chat_template": "{{ messages }}"}


def directory(folder: Path, settings: dict[str, Any] = SETTINGS, **config: Any) -> Path:
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizer_and_its_config_are_enough(tmp_path: Path) -> None:
    card = text_card(directory(tmp_path))
    assert (card.name, card.vocab_size, card.eos_token_ids) == (tmp_path.name, 259, [EOS])
    assert (card.chat_template, card.context_tokens) == ("{{ messages }}", UNKNOWN_CONTEXT)
    assert Tokenizer(card).encode("Hi", False) == list(b"Hi")


@pytest.mark.parametrize(("length", "context"), [(2048, 2048), (1e30, UNKNOWN_CONTEXT)])
def test_what_the_tokenizer_was_made_for_is_the_context(
    tmp_path: Path, length: float, context: int
) -> None:
    settings = SETTINGS | {"model_max_length": length}
    assert text_card(directory(tmp_path, settings)).context_tokens == context


def test_any_architecture_will_do_and_no_weights_are_needed(tmp_path: Path) -> None:
    inner = {"vocab_size": 300, "max_position_embeddings": 77}
    card = text_card(directory(tmp_path, architectures=["NewForCausalLM"], text_config=inner))
    assert (card.architecture, card.vocab_size, card.context_tokens) == ("NewForCausalLM", 300, 77)


def test_the_vocabulary_is_the_models_even_if_the_tokenizer_has_more(tmp_path: Path) -> None:
    assert text_card(directory(tmp_path, vocab_size=257)).vocab_size == 257


def test_equal_files_have_an_equal_digest_and_others_do_not(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        directory(tmp_path / name)
    (tmp_path / "c" / "tokenizer.json").write_text(byte_tokenizer(["<x>"]).to_str())
    digests = [text_card(tmp_path / name).digest for name in ("a", "b", "c")]
    assert digests[0] == digests[1] != digests[2]


def test_a_directory_without_a_tokenizer_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UnusableModel, match=r"no tokenizer\.json"):
        text_card(tmp_path)


def test_the_file_holds_the_card_and_the_shorter_length_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "card"
    model = tmp_path / "model"
    model.mkdir()
    directory(model)
    monkeypatch.setattr("sys.argv", ["card", str(model), str(file), "--max-len=99"])
    assert main() == 0
    assert card_file.read(file) == CardFile(card=text_card(model), max_len=99)
    shutil.rmtree(model)
    assert main() == 1
    assert "does not exist" in capsys.readouterr().err


def test_a_file_that_is_no_card_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\xff\x00")
    for name, words in (("odd", "is not a model card"), ("none", "cannot read")):
        with pytest.raises(ValueError, match=words):
            card_file.read(tmp_path / name)
