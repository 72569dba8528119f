"""The real model of the tests: the default model, in the cache of `tidegate serve`."""

from __future__ import annotations

from pathlib import Path

from tools.models.catalogue import CATALOGUE, DEFAULT
from tools.models.fetch import fetch, home


def smollm2_gguf() -> Path:
    """Return the path of SmolLM2-135M-Instruct as GGUF. Download it if needed. Raises Failure."""
    return fetch(CATALOGUE[DEFAULT], home())
