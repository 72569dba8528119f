"""Plans the memory of a model's images, without torch: the encoder's weights, and the encoded rows
that are kept."""

from __future__ import annotations

from protocol.config.worker import WorkerConfig
from worker.spec.model_spec import ModelSpec
from worker.vision.encoder_files import EncoderFiles
from worker.vision.support import image_support

FLOAT_BYTES = 4
"""Size of a weight: images are encoded in float32."""


def planned_image_bytes(
    config: WorkerConfig, spec: ModelSpec, files: EncoderFiles | None, *, device: str
) -> int:
    """Return the bytes that the worker needs to serve images; 0 if it serves none. Raises
    UnusableModel if a file of the checkpoint is damaged."""
    if files is None:
        return 0
    support = image_support(files, device=device, world_size=config.world_size)
    if support is None or support.reason or (support.needs_grid and not spec.has_rope_axes):
        return 0
    return FLOAT_BYTES * files.num_items + (config.image_cache_mib << 20)
