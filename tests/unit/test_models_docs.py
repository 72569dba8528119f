"""docs/models.md against the table of families."""

from __future__ import annotations

from pathlib import Path

from worker.models.families.__main__ import table

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_documented_families_are_the_supported_ones() -> None:
    """Update the page with `python -m worker.models.families`."""
    _, _, rest = DOCS.read_text().partition("<!-- families -->\n")
    assert rest.partition("\n<!-- /families -->")[0] == table()
