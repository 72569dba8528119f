"""A tokenizer that has passed its trial is not tried again."""

from __future__ import annotations

from pathlib import Path

from tools.models.trials import PassedTrials


def test_a_tokenizer_that_was_never_tried_has_not_passed(tmp_path: Path) -> None:
    trials = PassedTrials(tmp_path / "trials")
    assert not trials.is_expected("model")
    assert not trials.has_passed("model", b"{}")


def test_a_passed_trial_is_found_by_a_later_start(tmp_path: Path) -> None:
    PassedTrials(tmp_path / "trials").add("model", b"{}")
    trials = PassedTrials(tmp_path / "trials")
    assert trials.is_expected("model")
    assert trials.has_passed("model", b"{}")
    assert not trials.is_expected("another model")


def test_a_changed_tokenizer_is_tried_again(tmp_path: Path) -> None:
    trials = PassedTrials(tmp_path)
    trials.add("model", b"{}")
    assert not trials.has_passed("model", b"{ }")
    trials.add("model", b"{ }")
    assert trials.has_passed("model", b"{ }")


def test_a_damaged_record_is_no_pass(tmp_path: Path) -> None:
    trials = PassedTrials(tmp_path)
    trials.add("model", b"{}")
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"\xff")
    assert not trials.has_passed("model", b"{}")


def test_a_directory_that_cannot_be_made_stores_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trials = PassedTrials(tmp_path / "file" / "trials")
    trials.add("model", b"{}")
    assert not trials.has_passed("model", b"{}")
