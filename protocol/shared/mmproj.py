"""The files in which llama.cpp's converter stores the image encoder of a GGUF model."""

from __future__ import annotations

ENCODED_ARCHITECTURES = frozenset(
    {"gemma3", "llama", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"}
)
"""`general.architecture` of the models whose encoders can be used."""


def is_mmproj(name: str) -> bool:
    """Return whether a file is named like one."""
    return "mmproj" in name.lower() and name.endswith(".gguf")
