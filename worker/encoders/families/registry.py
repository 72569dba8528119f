"""All families of encoders, and the encoders that are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.encoders.families import bert, modernbert, mpnet, nomic
from worker.encoders.families.family import EncoderFamily
from worker.errors import UnusableModel

FAMILIES: tuple[EncoderFamily, ...] = tuple(
    family for module in (bert, modernbert, mpnet, nomic) for family in module.FAMILIES
)
REFUSED = {
    "jina_embeddings_v3": "Jina's embeddings v3 choose LoRA weights by task",
    "xlm-roberta-flash": "Jina's embeddings v3 choose LoRA weights by task",
    "deberta": "DeBERTa's attention has learned relative positions",
    "deberta-v2": "DeBERTa's attention has learned relative positions",
}
"""`model_type` of an encoder that is not supported -> why."""


def find_encoder(config: Mapping[str, Any]) -> EncoderFamily | None:
    """Return the family of encoders of a parsed config.json; None if it does not describe an
    encoder. Raises UnusableModel, with the reason, for an encoder that is known and not
    supported."""
    for family in FAMILIES:
        if family.matches(config):
            return family
    if (reason := REFUSED.get(str(config.get("model_type")))) is not None:
        raise UnusableModel(f"model_type {config['model_type']!r} is not supported: {reason}")
    return None
