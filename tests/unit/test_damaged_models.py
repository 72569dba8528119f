"""A short run of the test that damages models' files: each model loads or is refused in one line.

The full run is `python -m tests.torture.damaged --count 10000`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.torture.damaged.cases import LOADS, REFUSED, Originals, outcome_of
from worker.errors import UnusableModel
from worker.spec.families.family import ModelFamily
from worker.spec.families.registry import FAMILIES

COUNT, SEED = 200, 3


def test_damaged_models_load_or_are_refused_in_one_line(tmp_path: Path) -> None:
    originals = Originals(tmp_path)
    found = Counter(
        outcome_of(originals.damage(SEED, index), tries_tokenizer=False) for index in range(COUNT)
    )
    assert found[LOADS] + found[REFUSED] == COUNT
    assert found[REFUSED] > COUNT // 4


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_an_odd_number_in_a_config_raises_nothing_but_unusable_model(family: ModelFamily) -> None:
    for key in family.defaults:
        for odd in (0, -1, 1 << 200, 1e-320, 1e308, -0.5):
            with suppress(UnusableModel):
                family.spec({key: odd})
