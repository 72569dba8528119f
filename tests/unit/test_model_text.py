"""The text side of a model can be prepared before its weights are known."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.served_model import ModelOptions, ModelText, ServedModel
from protocol.config.gateway import ModelConfig
from protocol.engine.model_card import ModelCard, SamplingDefaults
from tests.support.scripted_engine import scripted_card
from tests.support.served import LIMITS
from tests.support.templates import UnlimitedTemplates

TEMPLATES = UnlimitedTemplates()
OPTIONS = ModelOptions.from_config(ModelConfig(), TEMPLATES)


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return scripted_card()


@pytest.fixture(scope="module")
def text(card: ModelCard) -> ModelText:
    return ModelText.from_card(card, OPTIONS, TEMPLATES)


def with_weights(card: ModelCard) -> ModelCard:
    """Return `card` as an engine reports it after it has loaded the weights."""
    return replace(
        card,
        digest="of the weights, too",
        defaults=SamplingDefaults(temperature=0.5),
        dtype="bfloat16",
        num_parameters=7,
        weights_bytes=14,
        numerics="abc",
    )


def test_a_model_prepared_early_equals_one_prepared_at_once(
    card: ModelCard, text: ModelText
) -> None:
    loaded = with_weights(card)
    assert text.fits(loaded)
    early = ServedModel.from_text(text, loaded, LIMITS, OPTIONS)
    once = ServedModel.from_card(loaded, LIMITS, OPTIONS, TEMPLATES)
    for name in ("card", "limits", "names", "defaults", "default_kwargs", "fingerprint"):
        assert getattr(early, name) == getattr(once, name)
    assert early.tokenizer is text.tokenizer
    assert early.tokenizer.encode("Hi", True) == once.tokenizer.encode("Hi", True)
    assert early.output_format.why == once.output_format.why


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer": b"{}"},
        {"chat_template": "{{ messages }}"},
        {"tool_use_template": "{{ tools }}"},
        {"special_tokens": {"bos_token": "<s>"}},
        {"vocab_size": 7},
        {"context_tokens": 7},
        {"eos_token_ids": [7]},
        {"response_template": "{}"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_text_side_of_another_model_does_not_fit(
    card: ModelCard, text: ModelText, changes: dict[str, object]
) -> None:
    assert not text.fits(replace(card, **changes))
