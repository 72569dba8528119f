"""The settings of a model's image processor, from the files of its checkpoint in the model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
CONFIG_FILE = "config.json"


class ProcessorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which image processor to call, and how. The sandbox process receives it with each image."""

    #: Module and class, below `transformers.models`.
    processor: str
    #: The settings of the checkpoint.
    values: dict[str, Any]
    #: Further arguments of each call.
    arguments: dict[str, Any]
    #: Names of the outputs that the model's encoder takes.
    tensors: tuple[str, ...]
    #: Whether the image is one of several, and the processor then treats it differently.
    has_company: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of a checkpoint that describe its image processor, decoded."""

    #: The settings of the image processor.
    image: Mapping[str, Any]
    #: The settings of the processor that joins images and text.
    joint: Mapping[str, Any]
    #: config.json of the model.
    config: Mapping[str, Any]

    @classmethod
    def from_card(cls, files: Mapping[str, bytes]) -> CheckpointFiles:
        """Decode the files. Raises ValueError if one of them is not a JSON object."""
        joint = _decoded(files, PROCESSOR_FILE)
        # Newer checkpoints have the settings of the image processor in the same file.
        image = joint.get("image_processor")
        if not isinstance(image, dict):
            image = _decoded(files, PREPROCESSOR_FILE)
        return cls(image, joint, _decoded(files, CONFIG_FILE))

    def joint_int(self, name: str, default: int) -> int:
        """Return a whole number from the settings of the joint processor. Raises ValueError."""
        value = self.joint.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{PROCESSOR_FILE}: {name} must be a positive number, not {value!r}")
        return value


def _decoded(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(files.get(name, b"{}"), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{name}: {error}") from None
