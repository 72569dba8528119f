"""docs/models.md agrees with the table of families, the lists of other architectures, the keys of
generation_config.json, and the formats of published templates."""

from __future__ import annotations

from pathlib import Path

from tests.support import family_formats
from worker.checkpoint import generation_config as generation
from worker.list_encoder_families import table as encoders
from worker.list_families import table
from worker.spec.architectures import documented
from worker.spec.wrappers import documented as wrappers

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_documented_families_are_the_supported_ones() -> None:
    """`python -m worker.list_families` prints this part of the page."""
    _, _, rest = DOCS.read_text().partition("<!-- families -->\n")
    assert rest.partition("\n<!-- /families -->")[0] == table()


def test_the_documented_encoders_are_the_supported_ones() -> None:
    """`python -m worker.list_encoder_families` prints this part of the page."""
    _, _, rest = DOCS.read_text().partition("<!-- encoders -->\n")
    assert rest.partition("\n<!-- /encoders -->")[0] == encoders()


def test_the_documented_architectures_are_those_of_the_lists() -> None:
    """`python -m worker.spec.architectures` prints this part of the page."""
    _, _, rest = DOCS.read_text().partition("<!-- transformers -->\n")
    assert rest.partition("\n<!-- /transformers -->")[0] == documented()


def test_the_documented_models_of_images_or_sound_are_those_whose_text_part_is_served() -> None:
    """`python -m worker.spec.wrappers` prints this part of the page."""
    _, _, rest = DOCS.read_text().partition("<!-- wrappers -->\n")
    assert rest.partition("\n<!-- /wrappers -->")[0] == wrappers()


def test_the_documented_keys_of_generation_config_are_those_of_the_tables() -> None:
    """`python -m worker.checkpoint.generation_config` prints this part of the page."""
    _, _, rest = DOCS.read_text().partition("<!-- generation -->\n")
    assert rest.partition("\n<!-- /generation -->")[0] == generation.documented()


def test_the_documented_formats_are_those_of_the_published_templates() -> None:
    """`python -m tests.support.family_formats` prints this part of the page."""
    _, _, rest = DOCS.read_text().partition("<!-- formats -->\n")
    assert rest.partition("\n<!-- /formats -->")[0] == family_formats.table()
