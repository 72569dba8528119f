"""Reads the parameters of rotary embeddings from a config.json. Needs no torch.

The rules are those of `modeling_rope_utils` in transformers, because publishers test checkpoints
with it. tests/differential/test_config_defaults.py compares each rule with transformers.
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
    """Leaves the frequencies as trained."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides all frequencies by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides the frequencies of slow pairs by `factor`, and keeps those of fast pairs.

    A pair (of dimensions that rotate together) is fast if it turns more than `high_freq_factor`
    times in `original_context` tokens, and slow if it turns fewer than `low_freq_factor` times.
    The frequencies of pairs between the two limits are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Divides each pair's frequency by a factor of its own, from the tensor `rope_freqs.weight`."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Divides the frequencies of slow pairs by `factor`, keeps those of fast pairs, and sharpens
    attention. Between slow and fast pairs, a linear ramp mixes the two frequencies."""

    factor: float
    original_context: int
    #: Multiplies cos and sin, which sharpens attention.
    attention_factor: float
    #: Turns in `original_context` tokens of the pair at the fast end of the ramp.
    beta_fast: float = 32.0
    #: Turns in `original_context` tokens of the pair at the slow end of the ramp.
    beta_slow: float = 1.0
    #: Whether the ends of the ramp are rounded outwards to whole pairs.
    truncate: bool = True


Scaling = NoScaling | LinearScaling | Llama3Scaling | FactorScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: Scaling = NoScaling()


def rope_config(config: Fields) -> RopeConfig:
    """Return the rotary embeddings of a config.json. Raises UnusableModel, naming the field.

    If `rope_scaling` is not empty, `rope_parameters` is ignored: the two are not merged. If the
    one in use has no `rope_theta`, the `rope_theta` at the top level of the config is used.
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
        raise UnusableModel(
            f"{name} must be the same in all layers; parameters per layer are not supported"
        )
    partial = config.get("partial_rotary_factor")
    if "partial_rotary_factor" in rope:
        partial = rope.number("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise UnusableModel(f"partial_rotary_factor {partial} is not supported")


def _scaling(rope: Fields, config: Fields) -> Scaling:
    """Return the scaling. `rope_type`, even if null, takes precedence over the older `type`."""
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
    """Return the context length that the model was trained with before scaling.

    The config's top level takes precedence over the rope parameters. The default is the model's
    whole context.
    """
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
        # As in transformers, zero means the default.
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        # As in transformers, null means false, and only a missing key means true.
        truncate=rope.flag("truncate", False) if "truncate" in rope else True,
    )


def _attention_factor(factor: float, rope: Fields) -> float:
    """Return YaRN's attention factor, which grows with the logarithm of the scaling factor.

    If the config has both `mscale` and `mscale_all_dim`, it is the ratio of the factors with these
    two weights.
    """
    log_factor = 0.1 * math.log(max(factor, 1.0))
    scale, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if scale and all_dim:
        return (scale * log_factor + 1.0) / (all_dim * log_factor + 1.0)
    return log_factor + 1.0
