"""Metadata of a model in a GGUF file: the inverse of `checkpoint.gguf_config`.

Everything is derived from the model's spec. The architectures of GGUF files cannot store every
spec. So the metadata are read back (`check_spec`), and a file never describes a different model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from gguf import RopeScalingType

from worker.checkpoint.gguf_families import FAMILIES, GGUFFamily
from worker.errors import UnusableModel
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.rope_config import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)

Values = dict[str, Any]
NOT_WRITTEN = frozenset({"gpt-oss", "gemma3n", "apertus", "llama4", "phimoe"})
"""Architectures that are read but not written: gpt-oss has fused experts and sinks, the matrices of
Gemma 3n's streams are in one tensor, the numbers of Apertus's activation are metadata, and files of
the others lack much of their config."""
WITH_PATTERN = ("olmo2", "exaone4")
"""Architectures whose files say which layers have windows."""


def architecture_of(spec: ModelSpec) -> str:
    """Return the `general.architecture` under which a GGUF file stores the model. Raises
    UnusableModel if there is none."""
    is_plain = (
        not spec.state_items
        and not any(each.latent for each in spec.attentions)
        and not any(mlp.shared for mlp in spec.mlps)
        and not any(layer.has_one_block for layer in spec.layers)
        and len(set(spec.layer_heads)) == 1
    )
    for name, family in FAMILIES.items():
        if is_plain and spec.architecture in family.families and name not in NOT_WRITTEN:
            return name
    raise UnusableModel(f"{spec.architecture} cannot be written as a GGUF file")


def metadata(spec: ModelSpec, architecture: str) -> Values:
    """Return the metadata of the model by name, without the architecture's prefix ("block_count",
    not "llama.block_count")."""
    attention, mlp = spec.attentions[0], spec.mlps[0]
    norm = "layer_norm_rms_epsilon" if spec.norm.kind == "rms" else "layer_norm_epsilon"
    found: Values = {
        "context_length": spec.context_tokens,
        "embedding_length": spec.hidden,
        "block_count": spec.num_layers,
        "feed_forward_length": mlp.intermediate,
        "vocab_size": spec.vocab_size,
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        f"attention.{norm}": float(spec.norm.eps),
    }
    if mlp.num_experts > 1:
        found |= {"expert_count": mlp.num_experts, "expert_used_count": mlp.top_k}
        if architecture == "qwen3moe":
            found["expert_feed_forward_length"] = mlp.intermediate
    return found | _windows(spec, architecture) | _ropes(spec) | _own(spec, architecture)


def _windows(spec: ModelSpec, architecture: str) -> Values:
    windows = [attention.window for attention in spec.attentions]
    sizes = [window for window in windows if window is not None]
    if not sizes:
        return {}
    found: Values = {"attention.sliding_window": sizes[0]}
    if architecture in WITH_PATTERN:
        found["attention.sliding_window_pattern"] = [window is not None for window in windows]
    return found


def _ropes(spec: ModelSpec) -> Values:
    ropes = [(each.window, each.rope) for each in spec.attentions if each.rope is not None]
    full = next((rope for window, rope in ropes if window is None), ropes[0][1] if ropes else None)
    if full is None:
        return {}
    found: Values = {"rope.dimension_count": full.width, "rope.freq_base": full.theta}
    sliding = next((rope for window, rope in ropes if window is not None), full)
    if sliding.theta != full.theta:
        found["rope.freq_base_swa"] = sliding.theta
    match full.scaling:
        case LinearScaling(factor):
            found |= {"rope.scaling.type": RopeScalingType.LINEAR.value}
            found |= {"rope.scaling.factor": factor}
        case YarnScaling() as yarn:
            found |= {
                "rope.scaling.type": RopeScalingType.YARN.value,
                "rope.scaling.factor": yarn.factor,
                "rope.scaling.original_context_length": yarn.original_context,
                "rope.scaling.yarn_beta_fast": yarn.beta_fast,
                "rope.scaling.yarn_beta_slow": yarn.beta_slow,
            }
    return found


def _own(spec: ModelSpec, architecture: str) -> Values:
    """Return the metadata that only some architectures have."""
    attention = spec.attentions[0]
    match architecture:
        case "gemma2":
            caps = {"attn": attention.soft_cap, "final": spec.logits_soft_cap}
            return {f"{name}_logit_softcapping": cap for name, cap in caps.items() if cap}
        case "gemma3" if spec.logits_soft_cap:
            return {"final_logit_softcapping": spec.logits_soft_cap}
        case "granite":
            return {
                "attention.scale": attention.scale,
                "embedding_scale": spec.embedding_scale,
                "residual_scale": spec.residual_scale,
                "logit_scale": 1 / spec.logits_scale,
                "rope.scaling.finetuned": attention.rope is not None,
            }
        case "cohere2":
            return {"logit_scale": spec.logits_scale}
        case "stablelm" | "gptneox":
            return {"use_parallel_residual": spec.layers[0].order.startswith("parallel")}
    return {}


def rope_of(spec: ModelSpec) -> RopeConfig | None:
    """Return the model's rotary embeddings with Llama 3 scaling; None if it has none. A GGUF file
    stores this scaling as a tensor, with a factor for each pair."""
    for attention in spec.attentions:
        if attention.rope and isinstance(attention.rope.scaling, Llama3Scaling):
            return attention.rope
    return None


# ---- the check


def check_spec(spec: ModelSpec, found: ModelSpec, family: GGUFFamily) -> None:
    """Raise UnusableModel if `found` differs from `spec`; the error names the first difference.
    `found` was read back from the metadata that was written for `spec`."""
    if family.has_whole_norms:
        found = replace(found, norm=replace(found.norm, offset=spec.norm.offset))
    found = replace(found, architecture=spec.architecture)
    if len(found.layers) == len(spec.layers):
        pairs = zip(spec.layers, found.layers, strict=True)
        found = replace(found, layers=tuple(_with_rope(theirs, ours) for ours, theirs in pairs))
    theirs = dict(_facts(found, ""))
    for name, value in _facts(spec, ""):
        other = theirs.get(name)
        if not _are_equal(value, other):
            raise UnusableModel(
                f"a GGUF file cannot store this model: {name} is {value!r:.60} and would be read "
                f"as {other!r:.60}"
            )


def _with_rope(found: LayerSpec, ours: LayerSpec) -> LayerSpec:
    """Return `found` with the rotary scaling of `ours`, if a tensor stores its factors. That tensor
    is written after the check."""
    attention, mine = found.attention, ours.attention
    if attention is None or mine is None or attention.rope is None or mine.rope is None:
        return found
    if not isinstance(attention.rope.scaling, FactorScaling):
        return found
    changed = replace(attention.rope, scaling=mine.rope.scaling)
    return replace(found, attention=replace(attention, rope=changed))


def _facts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each field, also of nested objects. The type of an object is
    yielded as a value, too."""
    if is_dataclass(value):
        yield name or "model", type(value).__name__
        for each in fields(value):
            yield from _facts(getattr(value, each.name), f"{name}.{each.name}".lstrip("."))
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from _facts(each, f"{name}[{index}]")
    else:
        yield name, value


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-5)  # metadata are float32
    return bool(one == other)
