"""docs/models/models.md agrees with the table of families, the lists of other architectures, the
keys of generation_config.json, and the formats of published templates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import family_formats
from tests.support.processes import ROOT
from worker import list_encoder_families, list_families
from worker.checkpoint import generation_config
from worker.spec import architectures, wrappers


@pytest.mark.parametrize(
    ("mark", "table"),
    [
        ("families", list_families.table),
        ("encoders", list_encoder_families.table),
        ("transformers", architectures.documented),
        ("wrappers", wrappers.documented),
        ("generation", generation_config.documented),
        ("formats", family_formats.table),
    ],
)
def test_a_part_of_the_page_is_what_its_module_prints(mark: str, table: Callable[[], str]) -> None:
    """`python -m` with the module prints the part."""
    _, _, rest = (
        (ROOT / "docs" / "models" / "models.md").read_text().partition(f"<!-- {mark} -->\n")
    )
    assert rest.partition(f"\n<!-- /{mark} -->")[0] == table()
