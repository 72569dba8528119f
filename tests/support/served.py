"""A model as the gateway serves it, without an engine."""

from __future__ import annotations

from typing import Any

from gateway.served_model import ModelOptions, ServedModel
from protocol.config.gateway import ModelConfig
from protocol.engine.messages import Limits
from protocol.engine.model_card import ModelCard
from tests.support.templates import UnlimitedTemplates

LIMITS = Limits(
    max_len=512, max_slots=8, block_tokens=16, num_blocks=64, token_budget=256, prefix_cache=True
)


def served(card: ModelCard, **config: Any) -> ServedModel:
    templates = UnlimitedTemplates()
    options = ModelOptions.from_config(ModelConfig(**config), templates)
    return ServedModel.from_card(card, LIMITS, options, templates)
