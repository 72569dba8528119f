"""What every format of model files is turned into, before a model is built from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from protocol.model_card import SamplingDefaults
from worker.loading.weights import WeightSource
from worker.models.config import LlamaConfig


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What the gateway needs; meanings as in ModelCard."""

    tokenizer: bytes
    eos_token_ids: list[int]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    response_template: str | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    license: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`paths`: the weight files, in a fixed order."""

    name: str
    config: LlamaConfig
    weights: WeightSource
    text: TextFacts
    paths: list[Path]
