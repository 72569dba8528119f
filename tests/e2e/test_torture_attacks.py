"""Some of the attacks of tests/torture/attacks.py, two at a time.

`make torture` runs all of them, sixteen at a time, and also checks how fast /livez answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from subprocess import CompletedProcess

import pytest

from tests.support.tiny_checkpoint import write_roomy_llama
from tests.torture.attacks import AttackTarget
from tests.torture.witnesses import AttackerResult, Witnessed

SOME = (
    "token ids",
    "an unknown field",
    "a regular expression",
    "a user",
    "template arguments",
    "derender: strings",
    "a chunk without a size",
    "no request",
    "unread answers",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackTarget]:
    with AttackTarget(write_roomy_llama(tmp_path_factory.mktemp("tiny"))) as target:
        target.strike("token ids", 1)  # pools are filled once
        yield target


@pytest.mark.parametrize("name", SOME)
def test_an_attack_is_refused_and_others_lose_nothing(target: AttackTarget, name: str) -> None:
    result = target.strike(name, 2)
    assert result.complaints(slack=None) == []


def test_each_harm_to_other_clients_is_a_complaint() -> None:
    well = Witnessed(
        64, livez_ms=50, ends=["finished"], before={"gateway": 100}, after={"gateway": 164}
    )
    assert well.complaints() == []
    assert replace(well, after={"gateway": 165}).complaints() == [
        "gateway: grew from 100 to 165 MiB"
    ]
    assert replace(well, ends=["finished", "broken: reset"]).complaints() == [
        "a stream of another client was lost: broken: reset"
    ]
    assert replace(well, ends=[]).complaints() == ["no stream of another client finished"]
    slow = replace(well, livez_ms=150)
    assert slow.complaints() == ["/livez took 150 ms"]
    assert slow.complaints(slack=2) == slow.complaints(slack=None) == []


def test_an_attacker_that_a_signal_killed_has_failed() -> None:
    killed = CompletedProcess([], returncode=-9, stdout="", stderr="")
    assert AttackerResult.from_process(killed).failure == "the attacker ended with -9"
