"""Names of the tensors of image encoders."""

from __future__ import annotations

from worker.spec.wrappers import text_name

OF_SOUND = ("audio_tower.", "embed_audio.")
"""Prefixes of the tensors for sound, which is not served."""


def tower_key(name: str) -> str:
    """Return the name of a tensor without the prefixes that only some files and classes have."""
    return name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)


def is_of_images(name: str) -> bool:
    """Return whether a tensor of a checkpoint belongs to its image encoder."""
    key = tower_key(name)
    return key == "image_newline" or (text_name(name) is None and not key.startswith(OF_SOUND))
