"""A short run of the damage of models' files: each model loads or is refused in one line.

The full run is `python -m tests.torture.damaged --count 10000`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.torture.damaged.cases import LOADS, REFUSED, Originals, outcome_of

COUNT, SEED = 300, 3


def test_damaged_models_load_or_are_refused_in_one_line(tmp_path: Path) -> None:
    originals = Originals(tmp_path)
    found = Counter(
        outcome_of(originals.damage(SEED, index), tries_tokenizer=False) for index in range(COUNT)
    )
    assert found[LOADS] + found[REFUSED] == COUNT
    assert found[REFUSED] > COUNT // 4
