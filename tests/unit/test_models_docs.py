"""The pages of docs/models agree with the table of families, the lists of other architectures, the
keys of generation_config.json, and the formats of published templates."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support import family_formats
from tests.support.processes import ROOT
from worker import list_encoder_families, list_families
from worker.checkpoint import generation_config
from worker.spec import architectures, wrappers
from worker.vision.support import IMAGE_TOKENS, WITH_GRID


@pytest.mark.parametrize(
    ("page", "mark", "table"),
    [
        ("families", "families", list_families.table),
        ("encoders", "encoders", list_encoder_families.table),
        ("transformers", "transformers", architectures.documented),
        ("families", "wrappers", wrappers.documented),
        ("checkpoints", "generation", generation_config.documented),
        ("models", "formats", family_formats.table),
    ],
)
def test_a_part_of_a_page_is_what_its_module_prints(
    page: str, mark: str, table: Callable[[], str]
) -> None:
    """`python -m` with the module prints the part."""
    text = (ROOT / "docs" / "models" / f"{page}.md").read_text()
    _, _, rest = text.partition(f"<!-- {mark} -->\n")
    assert rest.partition(f"\n<!-- /{mark} -->")[0] == table()


def test_the_page_of_images_says_how_the_positions_of_each_family_are() -> None:
    text = (ROOT / "docs" / "models" / "images.md").read_text()
    _, *rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \| ([^|]+) \|$", text, re.MULTILINE)
    kinds = {kind: positions for names, positions in rows for kind in re.findall(r"\w+", names)}
    assert kinds.keys() == IMAGE_TOKENS.keys()
    assert {kind for kind, positions in kinds.items() if positions == "three axes"} == WITH_GRID
