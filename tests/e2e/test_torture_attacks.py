"""Some of the attacks by one client over the network, a few at a time.

`make torture` runs all of them, sixteen at a time, and checks the time of /livez as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.tiny_checkpoint import write_roomy_llama
from tests.torture.attacks import AttackTarget

SOME = (
    "token ids",
    "an unknown field",
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
