"""Reads the parameters of rotary embeddings from a config.json. Needs no torch.

The rules are those of `modeling_rope_utils` in transformers, because publishers test checkpoints
with it. tests/differential/test_config_defaults.py compares each rule with transformers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.errors import UnusableModel
from worker.spec.fields import Fields

log = logging.getLogger(__name__)

ORIGINAL_CONTEXT = "original_max_position_embeddings"
AXES = 3
"""Axes of the rotary positions of M-RoPE: frames, rows and columns of an image. Those of a text are
equal, so axes change nothing in a text."""
MAX_WIDTH = 1 << 16
"""Largest head whose pairs may have factors of their own."""


@dataclass(frozen=True, slots=True)
class NoScaling:
    """Keeps the frequencies with which the model was trained."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides all frequencies by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides the frequencies of slow pairs by `factor`, and keeps those of fast pairs.

    A pair (of dimensions that rotate together) is fast if it turns more than `high_freq_factor`
    times in `original_context` tokens, and slow if it turns fewer than `low_freq_factor` times.
    The frequencies of pairs between the two limits are interpolated. In Llama 4 they are equal.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Divides each pair's frequency by a factor of its own, which may be infinite. The factors are
    those of the tensor `rope_freqs.weight` of a GGUF file, or those of proportional embeddings."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE: divides each pair's frequency by its own factor, from the list for texts of at most
    `original_context` tokens. `attention_factor` multiplies cos and sin.

    The checkpoint's second list of factors, for longer texts, is not used: a text's keys would
    change when it grows, and prefixes could not be shared.
    """

    factors: tuple[float, ...]
    original_context: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: divides the frequencies of slow pairs (see `Llama3Scaling`) by `factor`, keeps those of
    fast pairs, and interpolates between them with a linear ramp."""

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


Scaling = NoScaling | LinearScaling | Llama3Scaling | FactorScaling | LongRopeScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embeddings of the first `width` items of each head. `theta` is the base of the
    frequencies. The constructor raises UnusableModel unless `theta` is above 1 and `width` is even
    and above 0."""

    width: int
    theta: float
    scaling: Scaling = NoScaling()
    #: M-RoPE: the axis of the positions that turns each pair, of AXES; (): the first turns all.
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise UnusableModel(f"rope_theta is {self.theta}; it must be above 1")
        if self.width < 2 or self.width % 2:
            raise UnusableModel(f"rotary embeddings need an even width, not {self.width}")


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Factors of queries that grow with their positions:
    1 + beta * ln(1 + (position + offset) // tokens). This keeps the scores of long texts as far
    apart as those of short ones. Source: Llama 4, whose layers without positions have them.
    """

    beta: float
    tokens: int
    offset: int = 0

    def factors(self, context_tokens: int) -> list[float]:
        """Return the factor of each run of `tokens` positions of a text. The first run lacks
        `offset` positions."""
        runs = -(-(context_tokens + self.offset) // self.tokens)
        return [1 + self.beta * math.log(1 + run) for run in range(max(runs, 1))]


def query_growth(config: Fields, default: Mapping[str, Any] | None = None) -> QueryGrowth:
    """Return the growth of queries that the rope parameters describe. `default` is that of
    `rope_config`. Raises UnusableModel, naming the field, if a value is missing or wrong."""
    _, rope = _rope_fields(config, default)
    return QueryGrowth(rope.number("llama_4_scaling_beta"), _original_context(rope, config))


def score_factor(config: Fields, default: Mapping[str, Any] | None = None) -> float:
    """Return the factor of the scores of latent attention that the rope parameters describe: with
    `mscale_all_dim`, that of scaled embeddings, squared. `default` is that of `rope_config`. Raises
    UnusableModel, naming the field, if a value is wrong."""
    _, rope = _rope_fields(config, default)
    if _kind(rope) == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    log_factor = 0.1 * math.log(max(rope.positive("factor"), 1.0))
    factor: float = rope.number("mscale_all_dim") * log_factor + 1.0
    return factor * factor


def rope_config(
    config: Fields,
    head_dim: int,
    *,
    partial: float | None = None,
    default: Mapping[str, Any] | None = None,
    has_alpha: bool = False,
) -> RopeConfig:
    """Return the rotary embeddings of a config.json. Raises UnusableModel, naming the field, if a
    value is missing, wrong or not supported.

    partial   the share of each head that is rotated if the config has no `partial_rotary_factor`;
              None for architectures that do not read this key, which must then be 1 or missing
    default   rope parameters for a config that has none; None: the defaults of ConfigFields, and no
              scaling
    has_alpha whether the type "dynamic" with an `alpha` means a larger base, and no scaling, as in
              Hunyuan

    `rope_scaling` replaces `rope_parameters` as a whole if it is not empty: the two are not
    merged. The `rope_theta` at the top level is used if the replacing object has none.
    """
    name, rope = _rope_fields(config, default)
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnusableModel(f"{name} must be the same in all layers; others are not supported")
    theta = rope.number("rope_theta") if "rope_theta" in rope else config.number("rope_theta")
    width = _width(rope, config, head_dim, partial)
    replaced = config.get("rope_parameters")
    lost = replaced.get("rope_theta") if isinstance(replaced, dict) else None
    if lost not in (None, theta):
        log.warning(
            "rope_scaling replaces rope_parameters as a whole: rope_theta is %g, not %s; "
            "to use the lost value, set rope_theta in rope_scaling",
            theta,
            lost,
        )
    if has_alpha and _kind(rope) == "dynamic" and rope.get("alpha") is not None:
        return RopeConfig(width, theta * rope.positive("alpha") ** (width / max(width - 2, 1)))
    return RopeConfig(width, theta, _scaling(rope, config, width), _axes(rope, config, width // 2))


def has_rope(config: Fields) -> bool:
    """Return whether a config.json has a `rope_theta` that is not null, for an architecture that
    rotates nothing otherwise."""
    _, rope = _rope_fields(config, None)
    return (rope if "rope_theta" in rope else config).get("rope_theta") is not None


def _rope_fields(config: Fields, default: Mapping[str, Any] | None) -> tuple[str, Fields]:
    """Return the name and the value of the object with the rope parameters."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    return name, Fields(config.get(name, default or {}), name)


def layered_rope_config(
    config: Fields, head_dim: int, kind: str, *, theta: str, default_theta: float
) -> RopeConfig:
    """Return the rotary embeddings of the layers of one kind, for an architecture whose
    `rope_parameters` have one object per kind. Raises UnusableModel, naming the field, if a value
    is missing, wrong or not supported.

    kind            key of the object, such as "sliding_attention"
    theta           older configs have the base of this kind under this key, at the top level
    default_theta   the base if the config has neither

    The parameters of kind "full_attention" also include those of `rope_scaling`, which take
    precedence.
    """
    nested = Fields(config.get("rope_parameters") or {}, "rope_parameters")
    values = dict(nested.get(kind) or {})
    if kind == "full_attention":
        values |= config.get("rope_scaling") or {}
    values.setdefault("rope_theta", config.get(theta, default_theta))
    rope = Fields(values, f"rope_parameters.{kind}")
    if rope.get("rope_type") == "proportional":
        return _proportional(rope, head_dim)
    width = _width(rope, config, head_dim, None)
    return RopeConfig(width, rope.number("rope_theta"), _scaling(rope, config, width))


def _proportional(rope: Fields, head_dim: int) -> RopeConfig:
    """Return embeddings whose frequencies are those of the whole head, but which rotate only the
    first pairs. The others have an infinite factor, and so the frequency 0."""
    share, factor = rope.number("partial_rotary_factor", 1.0), rope.positive("factor", 1.0)
    if not 0 < share <= 1:
        raise UnusableModel(f"partial_rotary_factor is {share!r:.80}; it must be within 0..1")
    if not 2 <= head_dim <= MAX_WIDTH:
        raise UnusableModel(f"a head of {head_dim} numbers cannot be rotated")
    rotated = int(share * head_dim // 2)
    factors = (factor,) * rotated + (math.inf,) * (head_dim // 2 - rotated)
    return RopeConfig(head_dim, rope.number("rope_theta"), FactorScaling(factors))


def _width(rope: Fields, config: Fields, head_dim: int, default: float | None) -> int:
    share = config.get("partial_rotary_factor", default)
    if "partial_rotary_factor" in rope:
        share = rope.number("partial_rotary_factor")
    if share in (None, 1.0):
        return head_dim
    if default is None:
        raise UnusableModel(f"partial_rotary_factor {share} is not supported")
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise UnusableModel(f"partial_rotary_factor is {share!r:.80}; it must be within 0..1")
    return int(head_dim * share)


def _axes(rope: Fields, config: Fields, num_pairs: int) -> tuple[int, ...]:
    """Return the axis of each pair. It is () without M-RoPE, and if its sections do not fit the
    heads: then texts are computed all the same."""
    sections = rope.get("mrope_section")
    if (
        not isinstance(sections, list)
        or len(sections) != AXES
        or not all(type(size) is int and size > 0 for size in sections)
        or sum(sections) != num_pairs
    ):
        return ()
    # The classes of transformers interleave or do not, whatever the rope parameters say
    # (wrappers.TEXT_TYPES).
    if config.flag("mrope_interleaved", rope.get("mrope_interleaved", False)):
        axes = (pair % AXES for pair in range(num_pairs))
        return tuple(axis if pair < AXES * sections[axis] else 0 for pair, axis in enumerate(axes))
    return tuple(axis for axis, size in enumerate(sections) for _ in range(size))


def _kind(rope: Fields) -> Any:
    """Return the kind of scaling that the rope parameters select. The key `rope_type` takes
    precedence over the older `type`, even if it is null."""
    if "rope_type" not in rope and "type" not in rope:
        return "default"
    return rope.get("rope_type" if "rope_type" in rope else "type")


def _scaling(rope: Fields, config: Fields, width: int) -> Scaling:
    match kind := _kind(rope):
        case "default":
            return NoScaling()
        case "mrope" if "mrope_section" in rope:  # the older name of "default" in Qwen2-VL
            return NoScaling()
        case "linear":
            return LinearScaling(rope.positive("factor"))
        case "llama3":
            return _llama3(rope, config)
        case "yarn":
            return _yarn(rope, config)
        case "longrope":
            return _longrope(rope, config, width)
    raise UnusableModel(f"rope_type {kind!r} is not supported")


def _original_context(rope: Fields, config: Fields) -> int:
    """Return the context length that the model was trained with before scaling. The config's top
    level takes precedence over the rope parameters. The default is the model's whole context."""
    for fields in (config, rope):
        if ORIGINAL_CONTEXT in fields:
            if (tokens := fields.integer(ORIGINAL_CONTEXT)) < 1:
                raise UnusableModel(f"{ORIGINAL_CONTEXT} is {tokens}; it must be above zero")
            return tokens
    return config.integer("max_position_embeddings")


def _llama3(rope: Fields, config: Fields) -> Llama3Scaling:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high < low:
        raise UnusableModel(f"high_freq_factor ({high}) must not be below low_freq_factor ({low})")
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


def _longrope(rope: Fields, config: Fields, width: int) -> LongRopeScaling:
    original, context = _original_context(rope, config), config.integer("max_position_embeddings")
    factors = rope.get("short_factor")
    if (
        not isinstance(factors, list)
        or len(factors) != width // 2
        or not all(isinstance(each, int | float) and each > 0 for each in factors)
    ):
        raise UnusableModel(f"short_factor must be a list of {width // 2} numbers above zero")
    factor = rope.number("factor", context / original)
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        tuple(map(float, factors)), original, rope.number("attention_factor", attention)
    )


def _attention_factor(factor: float, rope: Fields) -> float:
    """Return YaRN's attention factor, which grows with the logarithm of the scaling factor.

    If the config has both `mscale` and `mscale_all_dim`, the result is the ratio of two factors,
    each with one of these weights on the logarithm.
    """
    log_factor = 0.1 * math.log(max(factor, 1.0))
    scale, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if scale and all_dim:
        return (scale * log_factor + 1.0) / (all_dim * log_factor + 1.0)
    return log_factor + 1.0
