"""Names of models as Ollama's clients write them, and facts about models in Ollama's shape."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from msgspec import UNSET

from gateway.api.ollama.responses import (
    ModelDetails,
    ModelSummary,
    RunningModel,
    ShownModel,
    timestamp,
)
from gateway.model_host import ListedModel
from protocol.engine.model_card import ModelCard

LATEST = ":latest"
"""The tag of a name that has no other tag."""
NEVER = "9999-12-31T23:59:59Z"
SUFFIX_MARK = "{# .Suffix #}"
"""Added to the template of a model that fills in the middle. Continue looks for ".Suffix", which
is a variable of Ollama's own templates, to find that out."""
_ARCHITECTURE_END = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


def served_name(name: str, names: Collection[str]) -> str:
    """Return the served name that a client means by `name`. The tag ":latest" may be missing or
    added. If there is no such name, return `name` without that tag.

    names  all served names, as far as they are known
    """
    candidates = (name, name.removesuffix(LATEST), name + LATEST)
    return next((each for each in candidates if each in names), name.removesuffix(LATEST))


def tagged(name: str) -> str:
    """Return a served name with a tag. Clients compare listed names with names that have one."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def family_of(card: ModelCard) -> str:
    """Return the model family, as GGUF files spell it in the usual cases: "llama"."""
    return _ARCHITECTURE_END.sub("", card.architecture).lower()


def details_of(card: ModelCard) -> ModelDetails:
    family = family_of(card)
    is_loaded = card.num_parameters > 0
    return ModelDetails(
        parent_model="",
        format=card.file_format,
        family=family,
        families=[family],
        parameter_size=_rounded(card.num_parameters) if is_loaded else "",
        quantization_level=(card.quantization or card.dtype) if is_loaded else "",
    )


def _rounded(number: int) -> str:
    """Return a number of parameters in words: "1.5B"."""
    for unit, letter in _UNITS:
        if number >= unit:
            return f"{number / unit:.1f}{letter}"
    return str(number)


def summary(facts: ListedModel, name: str) -> ModelSummary:
    card = facts.card
    return ModelSummary(
        name=tagged(name),
        model=tagged(name),
        modified_at=timestamp(facts.created_at),
        size=card.weights_bytes,
        digest=card.digest,
        details=details_of(card),
    )


def running(facts: ListedModel, name: str) -> RunningModel:
    card = facts.card
    return RunningModel(
        name=tagged(name),
        model=tagged(name),
        size=card.weights_bytes,
        digest=card.digest,
        details=details_of(card),
        expires_at=NEVER,
        size_vram=0,
        context_length=facts.max_len,
    )


def shown(facts: ListedModel) -> ShownModel:
    card = facts.card
    template = card.chat_template or ""
    if facts.fills_in_middle:
        template += SUFFIX_MARK
    return ShownModel(
        modelfile=f"# Served by Tidegate.\nFROM {facts.names[0]}\n",
        parameters=_parameters(facts),
        template=template,
        details=details_of(card),
        model_info=_model_info(facts),
        capabilities=_capabilities(facts),
        modified_at=timestamp(facts.created_at),
        license=card.license or UNSET,
    )


def _parameters(facts: ListedModel) -> str:
    """Return the parameters in effect, one per line, in the form of a Modelfile."""
    in_effect = facts.defaults.effective_values()
    numbers = {name: value for name, value in in_effect.items() if isinstance(value, int | float)}
    values = {"num_ctx": facts.max_len, **numbers}
    values["repeat_penalty"] = values.pop("repetition_penalty")
    return "\n".join(f"{name:<30} {json.dumps(value)}" for name, value in values.items())


def _model_info(facts: ListedModel) -> dict[str, Any]:
    card, family = facts.card, family_of(facts.card)
    return {
        "general.architecture": family,
        "general.name": card.name,
        "general.parameter_count": card.num_parameters,
        f"{family}.context_length": facts.max_len,
        f"{family}.vocab_size": card.vocab_size,
    }


def _capabilities(facts: ListedModel) -> list[str]:
    output_format, encoding = facts.output_format, facts.card.encoding
    has = {
        "completion": facts.card.generates,
        "embedding": encoding is not None and encoding.task == "embed" and not facts.parent,
        "tools": output_format is not None and output_format.tools is not None,
        "thinking": output_format is not None and output_format.reasoning is not None,
        "insert": bool(facts.fills_in_middle),
        "vision": facts.image_refusal == "",
    }
    return [name for name, value in has.items() if value]
