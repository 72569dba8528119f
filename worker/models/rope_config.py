"""Rotary embedding parameters of a config.json. Needs no torch.

The rules are those of transformers (`modeling_rope_utils`), with which checkpoints are tested;
tests/differential/test_config_defaults.py compares each of them.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields

log = logging.getLogger(__name__)

ORIGINAL_CONTEXT = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class NoScaling:
    """Angles as trained."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All angles divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow pairs are slowed by `factor`, fast ones kept, those between the two limits blended.

    A pair is fast if it turns more than `high_freq_factor` times in `original_context` tokens,
    slow if fewer than `low_freq_factor` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Each pair's frequency divided by its own factor, as GGUF's `rope_freqs.weight` lists them."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Slow pairs are slowed by `factor`, fast ones kept, a ramp between; attention is sharpened.

    `beta_fast`, `beta_slow`: turns in `original_context` tokens at the ends of the ramp.
    `attention_factor` multiplies cos and sin.
    """

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


Scaling = NoScaling | LinearScaling | Llama3Scaling | FactorScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: Scaling = NoScaling()


def rope_config(config: Fields) -> RopeConfig:
    """Return the rotary embeddings of a config.json. Raises UnusableModel, naming the field.

    `rope_scaling` replaces `rope_parameters` as a whole if it says anything: the two are not
    merged. A `rope_theta` at the top level serves if the one that counts has none.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = Fields(config.get(name) or {}, name)
    _refuse_the_unknown(rope, config, name)
    theta = rope.number("rope_theta") if "rope_theta" in rope else config.number("rope_theta")
    if theta <= 1:
        raise UnusableModel(f"rope_theta is {theta}; it must be above 1")
    replaced = config.get("rope_parameters")
    lost = replaced.get("rope_theta") if isinstance(replaced, dict) else None
    if lost not in (None, theta):
        log.warning(
            "rope_scaling replaces rope_parameters as a whole: rope_theta is %g, not %s; "
            "to use the lost value, set rope_theta in rope_scaling",
            theta,
            lost,
        )
    return RopeConfig(theta, _scaling(rope, config))


def _refuse_the_unknown(rope: Fields, config: Fields, name: str) -> None:
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnusableModel(f"{name} must be the same in all layers; others are not supported")
    partial = config.get("partial_rotary_factor")
    if "partial_rotary_factor" in rope:
        partial = rope.number("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise UnusableModel(f"partial_rotary_factor {partial} is not supported")


def _scaling(rope: Fields, config: Fields) -> Scaling:
    """The kind's newer name wins over the older one, even if it is null."""
    kind = rope.get("rope_type" if "rope_type" in rope else "type")
    if "rope_type" not in rope and "type" not in rope:
        kind = "default"
    match kind:
        case "default":
            return NoScaling()
        case "linear":
            return LinearScaling(rope.positive("factor"))
        case "llama3":
            return _llama3(rope, config)
        case "yarn":
            return _yarn(rope, config)
    raise UnusableModel(f"rope_type {kind!r} is not supported")


def _original_context(rope: Fields, config: Fields) -> int:
    """The top level wins over the parameters; without either it is the model's whole context."""
    for fields in (config, rope):
        if ORIGINAL_CONTEXT in fields:
            if (tokens := fields.integer(ORIGINAL_CONTEXT)) < 1:
                raise UnusableModel(f"{ORIGINAL_CONTEXT} is {tokens}; it must be above zero")
            return tokens
    return config.integer("max_position_embeddings")


def _llama3(rope: Fields, config: Fields) -> Llama3Scaling:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        raise UnusableModel(f"high_freq_factor ({high}) must be above low_freq_factor ({low})")
    return Llama3Scaling(rope.positive("factor"), low, high, _original_context(rope, config))


def _yarn(rope: Fields, config: Fields) -> YarnScaling:
    original = _original_context(rope, config)
    if "factor" in rope and rope.get("factor") is None:
        factor = config.integer("max_position_embeddings") / original
    else:
        factor = rope.positive("factor")
    attention = rope.get("attention_factor")
    return YarnScaling(
        factor=factor,
        original_context=original,
        attention_factor=(
            _attention_factor(factor, rope)
            if attention is None
            else rope.number("attention_factor")
        ),
        # Zero counts as not given.
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        # Null counts as false, as only a missing key is true.
        truncate=rope.flag("truncate", False) if "truncate" in rope else True,
    )


def _attention_factor(factor: float, rope: Fields) -> float:
    """By the scaling factor, or by the ratio of two weights of it if the config has both."""
    log_factor = 0.1 * math.log(max(factor, 1.0))
    scale, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if scale and all_dim:
        return (scale * log_factor + 1.0) / (all_dim * log_factor + 1.0)
    return log_factor + 1.0
