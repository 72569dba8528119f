"""Encodes images in a thread beside the steps, one after another."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Self

from torch import Tensor

from protocol.worker.steps import DropImages, EncodeImage, ImageEncoded
from worker.vision.tower import ImageTower

log = logging.getLogger(__name__)

ImageMessage = EncodeImage | DropImages


class ImageService:
    """Applies the engine's messages about images. Use it as a context manager.

    fd     readable when a report is due
    rows   digest -> rows, of the images that were reported. The runner reads them
    """

    def __init__(self, tower: ImageTower, rows: dict[str, Tensor]) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.rows = rows
        self._tower = tower
        self._jobs: SimpleQueue[EncodeImage | None] = SimpleQueue()
        self._done: deque[tuple[ImageEncoded, Tensor | None]] = deque()
        self._thread = Thread(target=self._run, name="image encoder", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._jobs.put(None)
        self._thread.join()
        os.close(self.fd)

    def apply(self, message: ImageMessage) -> None:
        if isinstance(message, EncodeImage):
            self._jobs.put(message)
            return
        for digest in message.digests:
            del self.rows[digest]

    def report(self) -> ImageEncoded | None:
        """Return the next report, and keep the rows of its image; None if there is none."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        if not self._done:
            return None
        report, rows = self._done.popleft()
        if rows is not None:
            self.rows[report.digest] = rows
        return report

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            started = perf_counter()
            rows, error = None, ""
            try:
                rows = self._tower.encode(job.digest, job.tensors, job.num_rows)
            except ValueError as problem:
                error = str(problem)
            except Exception as problem:  # else its request would wait for ever
                log.exception("an image could not be encoded")
                error = f"the image could not be encoded: {problem}"
            report = ImageEncoded(digest=job.digest, encode_s=perf_counter() - started, error=error)
            self._done.append((report, rows))
            os.eventfd_write(self.fd, 1)
