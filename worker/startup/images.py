"""Loads the image encoder of a worker, and says why images are refused if there is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from protocol.config.worker import WorkerConfig
from protocol.engine.attachments import ImageSupport
from worker.device.timing import StartupTiming
from worker.errors import UnusableModel
from worker.loading.decoder import LoadedModel
from worker.spec.model_spec import ModelSpec
from worker.spec.step_limits import StepLimits, with_whole_runs
from worker.vision.mmproj_header import UNREADABLE
from worker.vision.support import find_images, image_support, longest_run, without_encoder
from worker.vision.tower import ImageTower

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedImages:
    """How the images of a model are served.

    support    what clients must know; None: the model's images are not computed
    tower      the encoder; None: the worker encodes no images
    num_rows   number of rows that are kept
    files      files of the encoder that are not files of the model
    """

    support: ImageSupport | None
    tower: ImageTower | None = None
    num_rows: int = 0
    files: Sequence[Path] = ()

    @property
    def num_bytes(self) -> int:
        """The size of the rows that are kept."""
        return 0 if self.tower is None else self.tower.row_bytes * self.num_rows


def load_images(
    config: WorkerConfig,
    loaded: LoadedModel,
    limits: StepLimits,
    device: torch.device,
    timing: StartupTiming,
) -> tuple[ServedImages, StepLimits]:
    """Load the encoder of the model's images, if there is one. Return the images, and limits whose
    steps have room for an image if that is computed as a whole.

    Raises UnusableModel if the file of --mmproj cannot be used.
    """
    spec, found = loaded.spec, find_images(config)
    if not isinstance(spec, ModelSpec):
        return ServedImages(None), limits
    if (files := found.files) is None:
        if found.cause:
            log.warning("no mmproj file beside the model is used: %s", found.cause)
        elif found.reason:
            log.info("requests with images are refused: %s", found.reason)
        return ServedImages(without_encoder(found)), limits
    support = image_support(files, device=device.type, world_size=config.world_size)
    if support is None:
        return ServedImages(None), limits
    reason = support.reason
    if not reason and support.needs_grid and not spec.has_rope_axes:
        reason = "the files of this model have no mrope_section that fits its heads"
    if not reason and spec.sees_whole_runs:
        longest = longest_run(files)
        roomy = with_whole_runs(limits, config, longest)
        if roomy is None:
            reason = (
                f"an image of this model is computed in one step of {longest:,} tokens: serve with "
                f"--token-budget {longest + limits.max_slots - 1}, or more"
            )
        elif roomy.token_budget > limits.token_budget:
            limits = roomy
            log.info(
                "a step has up to %d tokens, because it computes an image as a whole",
                roomy.token_budget,
            )
    if not reason:
        try:
            with timing("load the image encoder"):
                dtype: torch.dtype = getattr(torch, loaded.card.dtype)
                tower = ImageTower.load(files, spec.hidden, dtype, scale=spec.image_scale)
        except UnusableModel as error:
            if config.mmproj:  # a file that was given is never ignored
                raise UnusableModel(
                    f"--mmproj {config.mmproj}: the image encoder cannot be loaded: {error}",
                    remedy=UNREADABLE,
                ) from error
            # The text part of the model may be served all the same.
            reason = f"the image encoder of this model cannot be loaded: {error}"
    if reason:
        log.warning("requests with images are refused: %s", reason)
        return ServedImages(msgspec.structs.replace(support, reason=reason)), limits
    num_rows = (config.image_cache_mib << 20) // tower.row_bytes
    log.info("image encoder: %d MiB; rows kept: %d", tower.num_bytes >> 20, num_rows)
    support = msgspec.structs.replace(
        support, max_tokens=num_rows, sees_whole_runs=spec.sees_whole_runs
    )
    return ServedImages(support, tower, num_rows, files.paths), limits
