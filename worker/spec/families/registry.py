"""The list of all model families, and the search for the one that a config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.errors import UnusableModel
from worker.spec.families import (
    apertus,
    bamba,
    deepseek,
    ernie,
    falcon,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt,
    gpt_oss,
    hunyuan,
    jamba,
    kimi,
    lfm,
    llama,
    llama4,
    mamba,
    minimax,
    mistral,
    nemotron,
    olmo,
    phi,
    qwen,
    recurrent_gemma,
)
from worker.spec.families.family import ModelFamily

MODULES = (
    *(llama, mistral, qwen, gemma, gemma3n, gemma4, phi, olmo, gpt, gpt_oss, lfm),
    *(nemotron, falcon, jamba, mamba, glm, ernie, minimax, hunyuan, bamba),
    *(deepseek, kimi, apertus, llama4, recurrent_gemma),
)
FAMILIES: tuple[ModelFamily, ...] = tuple(
    family for module in MODULES for family in module.FAMILIES
)

AND_OTHERS = (
    ", and through transformers (the extra tidegate[transformers]) those that "
    "docs/models/transformers.md lists"
)


def find_family(config: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a parsed config.json. Raises UnusableModel if no family supports its
    architecture, or if it names two."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    if architectures is None:
        return _with_model_type(model_type)
    for family in FAMILIES:
        if architectures in [[name] for name in family.architectures]:
            if model_type in (None, family.model_type, *family.other_types):
                return family
            raise UnusableModel(
                f"config.json contradicts itself: {family.architecture} has the model_type "
                f"{family.model_type!r}, not {model_type!r}",
                remedy="correct 'architectures' or 'model_type'",
            )
    raise UnusableModel(f"architecture {architectures!r:.80} is not supported; {_supported()}")


def _with_model_type(model_type: Any) -> ModelFamily:
    for family in FAMILIES:
        if model_type == family.model_type:
            return family
    if model_type is None:
        raise UnusableModel("config.json has neither 'architectures' nor 'model_type'")
    raise UnusableModel(f"model_type {model_type!r:.80} is not supported; {_supported()}")


def _supported() -> str:
    known = ", ".join(family.model_type for family in FAMILIES)
    return f"supported model types: {known}{AND_OTHERS}"
