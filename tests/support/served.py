"""A model as the gateway serves it, without an engine."""

from __future__ import annotations

from gateway.served import ModelOptions, ServedModel
from protocol.config.gateway import GatewayConfig
from protocol.messages import Limits
from protocol.model_card import ModelCard
from tests.support.templates import UnlimitedTemplates

LIMITS = Limits(
    max_len=512, max_slots=8, block_tokens=16, num_blocks=64, token_budget=256, prefix_cache=True
)


def served(card: ModelCard) -> ServedModel:
    templates = UnlimitedTemplates()
    return ServedModel.of(card, LIMITS, ModelOptions.of(GatewayConfig(), templates), templates)
