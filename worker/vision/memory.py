"""Plans the memory of a model's images, without torch: the encoder's weights, and the encoded rows
that are kept."""

from __future__ import annotations

import math
from pathlib import Path

from protocol.config.worker import WorkerConfig
from worker.checkpoint.safetensors_files import SafetensorsFiles, weight_files
from worker.spec.model_spec import ModelSpec
from worker.vision.support import image_support, is_of_images

FLOAT_BYTES = 4
"""Size of a weight: images are encoded in float32."""


def planned_image_bytes(config: WorkerConfig, spec: ModelSpec, *, device: str) -> int:
    """Return the bytes that the worker needs to serve images; 0 if it serves none. Raises
    UnusableModel if a file of the checkpoint is damaged."""
    path = Path(config.model)
    support = image_support(path, device=device, world_size=config.world_size)
    if support is None or support.reason or (support.needs_grid and not spec.has_rope_axes):
        return 0
    files = SafetensorsFiles(weight_files(path), lambda name: name if is_of_images(name) else None)
    items = sum(math.prod(tensor.shape) for tensor in files.tensors.values())
    return FLOAT_BYTES * items + (config.image_cache_mib << 20)
