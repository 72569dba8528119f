"""Reads the gateway's config from the environment variable that `tidegate serve` sets."""

from __future__ import annotations

import os

import msgspec

from protocol.config.gateway import GatewayConfig

CONFIG_VARIABLE = "TIDEGATE_GATEWAY"


def config_from_environment() -> GatewayConfig:
    """Return the config that the variable has as JSON; the defaults without it."""
    return msgspec.json.decode(os.environ.get(CONFIG_VARIABLE, "{}"), type=GatewayConfig)
