"""What every format of model files is turned into, before a model is built from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worker.loading.text import TextFacts
from worker.loading.weights import WeightSource
from worker.models.config import LlamaConfig


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`paths`: the weight files, in a fixed order."""

    name: str
    config: LlamaConfig
    weights: WeightSource
    text: TextFacts
    paths: list[Path]
