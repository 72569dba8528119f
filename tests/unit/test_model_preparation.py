"""The preparation of a served model: once for each card, and once for each error."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.model_preparation import ModelPreparation
from gateway.prompt.template import ParsedTemplate, TemplateLoader
from protocol.config.gateway import ModelConfig
from protocol.engine.model_card import CardFile, ModelCard, write_card
from tests.support.scripted_engine import scripted_card
from tests.support.served import LIMITS
from tests.support.templates import UnlimitedTemplates


class CountedTemplates(UnlimitedTemplates):
    """Counts the templates that it loads."""

    num_loads = 0

    def load(self, source: str, special_tokens: Mapping[str, str]) -> ParsedTemplate:
        self.num_loads += 1
        return super().load(source, special_tokens)


def preparation(
    card: ModelCard,
    unservable: list[ValueError] | None = None,
    templates: TemplateLoader | None = None,
    **config: Any,
) -> ModelPreparation:
    """Return the preparation of models with the tokenizer of `card`, which counts as tried."""
    errors: list[ValueError] = [] if unservable is None else unservable
    return ModelPreparation(
        ModelConfig(tried_tokenizer=sha256(card.tokenizer).hexdigest(), **config),
        templates or UnlimitedTemplates(),
        describe_writing=lambda: "",
        on_unservable=errors.append,
    )


def test_a_model_is_prepared_once_for_each_welcome() -> None:
    card = scripted_card()
    models = preparation(card)
    first = models.served_model(card, LIMITS)
    assert models.served_model(card, LIMITS) is first
    restarted = models.served_model(card, replace(LIMITS))
    assert restarted is not first
    assert models.served is restarted


def test_the_text_side_is_kept_if_only_the_weights_are_new() -> None:
    card = scripted_card()
    models = preparation(card)
    first = models.served_model(card, LIMITS)
    finetuned = models.served_model(replace(card, digest="other"), LIMITS)
    assert (finetuned.card.digest, finetuned.tokenizer) == ("other", first.tokenizer)
    other = models.served_model(replace(card, chat_template="Hello."), LIMITS)
    assert other.renderer is not first.renderer


def test_the_expected_model_is_prepared_before_its_engine_reports_it(tmp_path: Path) -> None:
    card, file, templates = scripted_card(), tmp_path / "model.card", CountedTemplates()
    write_card(file, CardFile(card=card, max_len=512))
    models = preparation(card, templates=templates, expected_card=str(file))
    models.prepare_expected()
    assert (models.served, templates.num_loads) == (None, 1)
    assert models.served_model(card, LIMITS).card == card
    assert templates.num_loads == 1


def test_the_error_of_a_model_that_cannot_be_served_is_kept() -> None:
    card = scripted_card(tokenizer=b"{}")
    errors: list[ValueError] = []
    models = preparation(card, errors)
    with pytest.raises(ValueError) as first:  # noqa: PT011  (the library words it)
        models.served_model(card, LIMITS)
    with pytest.raises(ValueError) as second:  # noqa: PT011  (the library words it)
        models.served_model(card, LIMITS)
    assert second.value is first.value
    assert errors == [first.value]
    assert models.has_failed(card)
    assert not models.has_failed(scripted_card())


def test_only_the_first_model_that_cannot_be_served_is_reported() -> None:
    card = scripted_card()
    errors: list[ValueError] = []
    models = preparation(card, errors)
    served = models.served_model(card, LIMITS)
    damaged = scripted_card(tokenizer=b"not JSON")  # was not tried, so a process tries it
    with pytest.raises(ValueError, match="tokenizer"):
        models.served_model(damaged, LIMITS)
    assert (models.served, errors) == (served, [])
