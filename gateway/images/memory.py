"""The images of a gateway process, within limits of memory: preprocessed ones, and files.

A file of 70 bytes can become tensors of 50 MB, and an open request keeps those of all its images,
because another engine may need them. So the memory is counted from the time at which an image was
preprocessed until nothing refers to it.

Files from hosts and uploaded files are counted, too. Those in the bodies of requests have the
bodies' limit (gateway/http/body_memory.py).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from gateway.images.families import ImageFacts
from protocol.engine.attachments import AttachedTensor, attached_bytes
from protocol.wire.errors import Overloaded

RETRY_S = 5.0
"""When to try again if the images of other requests need all of the memory."""
Grow: TypeAlias = Callable[[int], None]
"""Reserves this number of further bytes. Raises Overloaded if there is no room."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class ProcessedImage:
    """A preprocessed image."""

    #: `attachment_digest` of the tensors.
    digest: str
    tensors: Sequence[AttachedTensor]
    facts: ImageFacts

    @property
    def num_bytes(self) -> int:
        return attached_bytes(self.tensors)


class ImageMemory:
    """Preprocessed images by key: those that requests use, and the last ones. Images that no
    request uses are dropped in the order of their last use.

    max_bytes  most bytes of tensors
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        #: Bytes of all images that something refers to.
        self.num_bytes = 0
        #: The image that was used last is the last.
        self._last: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[str, ProcessedImage] = (
            weakref.WeakValueDictionary()
        )

    def get(self, key: str) -> ProcessedImage | None:
        image = self._alive.get(key)
        if image is not None:
            self._last[key] = image
            self._last.move_to_end(key)
        return image

    def put(self, key: str, image: ProcessedImage) -> bool:
        """Add an image that `get` does not return, and drop others to make room for it. Return
        whether there is room. If there is none, requests use all of the memory, and the caller must
        drop the image."""
        self._alive[key] = self._last[key] = image
        size = image.num_bytes
        self.num_bytes += size
        weakref.finalize(image, self._release, size).atexit = False
        while self.num_bytes > self.max_bytes and self._last:
            self._last.popitem(last=False)
        return self.num_bytes <= self.max_bytes

    def _release(self, size: int) -> None:
        self.num_bytes -= size


class FileMemory:
    """The files of images that are loaded, each from its first byte until it is preprocessed. They
    count as far as they have arrived, so a slow host holds little.

    max_bytes  most bytes of files
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        #: Bytes of all files.
        self.num_bytes = 0

    @contextmanager
    def file(self) -> Iterator[Grow]:
        """Yield the function that reserves the memory of one file. The memory is freed after the
        `with` block."""
        held = 0

        def grow(num_bytes: int) -> None:
            nonlocal held
            if self.num_bytes + num_bytes > self.max_bytes:
                raise Overloaded(
                    f"the images that are being loaded fill the {self.max_bytes >> 20:,} MiB for "
                    "them; try again later",
                    retry_after_s=RETRY_S,
                )
            self.num_bytes += num_bytes
            held += num_bytes

        try:
            yield grow
        finally:
            self.num_bytes -= held
