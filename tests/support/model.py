"""The real model that tests run on: the default one, from the cache of `tidegate serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.failure import Failure
from tools.models.catalogue import CATALOGUE, DEFAULT
from tools.models.fetch import fetch, home


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF, fetched if need be; skips the test where it cannot be had."""
    try:
        return fetch(CATALOGUE[DEFAULT], home())
    except Failure as failure:
        pytest.skip(f"needs the default model, which is not in the cache: {failure}")
