"""Decodes and preprocesses images in a sandbox process, and caches the results.

The results are cached by the SHA-256 of the image's bytes, so that an image of a conversation is
processed once, however many turns follow. Several requests with the same new image wait for one
call.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from gevent.event import AsyncResult

from gateway.images.families import ImageFacts
from gateway.images.settings import ProcessorSettings
from gateway.images.source import ImageSource, decoded_bytes
from gateway.sandbox.messages import (
    CallFailed,
    ImageProcessed,
    LoadProcessor,
    ProcessImage,
)
from gateway.sandbox.process import LimitExceeded, SandboxProcess, frame_of
from protocol.engine.attachments import AttachedTensor, attached_bytes
from protocol.wire.arrays import UInt8
from protocol.wire.errors import InvalidImage

CPU_S = 20.0
"""CPU time limit of one image. The first one also loads transformers, which takes 2 s."""
MEMORY_BYTES = 2 << 30
RETIRE_BYTES = 1 << 30
MAX_WAITING = 32
"""Maximum number of images that wait for the process. Further ones are refused."""
CACHE_BYTES = 256 << 20
"""Default size of the cache of preprocessed images in a gateway process."""
_INLINE_BYTES = 1 << 18
"""Larger images are decoded from base64 and hashed in a thread."""


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """A preprocessed image."""

    #: `attachment_digest` of the tensors.
    digest: str
    tensors: Sequence[AttachedTensor]
    facts: ImageFacts

    @property
    def num_bytes(self) -> int:
        return attached_bytes(self.tensors)


@dataclass(slots=True)
class ImageTimes:
    """What the images of a request cost."""

    num_images: int = 0
    #: Images that were in the cache.
    num_hits: int = 0
    #: Seconds of the process for decoding, and for preprocessing.
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    #: Seconds until all images were ready, with loading and waiting.
    total_s: float = 0.0


class ImageFetcher(Protocol):
    """Loads the bytes of images that are elsewhere."""

    def fetch(self, source: ImageSource) -> bytes:
        """Return the bytes of an image with an http(s): URL. Raises InvalidImage."""


class ImageReader:
    """Reads the images of requests for all models of a gateway process.

    fetcher      loads images with http(s): URLs
    offload      runs a function in a thread
    cache_bytes  size of the cache of preprocessed images
    """

    def __init__(
        self,
        fetcher: ImageFetcher,
        *,
        offload: Callable[[Callable[[], tuple[bytes, str]]], tuple[bytes, str]],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._fetcher = fetcher
        self._offload = offload
        self._process = SandboxProcess(
            cpu_s=CPU_S,
            memory_bytes=MEMORY_BYTES,
            retire_bytes=RETIRE_BYTES,
            wall_s=3 * CPU_S,
            max_waiting=MAX_WAITING,
            queued="images are waiting to be decoded",
        )
        self._cache = ImageCache(cache_bytes)
        self._pending: dict[str, AsyncResult] = {}

    def close(self) -> None:
        self._process.close()

    def load(self, settings: ProcessorSettings) -> str:
        """Load a model's image processor. Return why that fails, or ""."""
        try:
            reply = self._process.call(LoadProcessor(settings))
        except LimitExceeded as error:
            return str(error)
        return reply.message if isinstance(reply, CallFailed) else ""

    def read(
        self, sources: Sequence[ImageSource], settings: ProcessorSettings, times: ImageTimes
    ) -> list[ProcessedImage]:
        """Return the preprocessed images, and add what they cost to `times`.

        Raises InvalidImage, naming the field, if an image cannot be used, and Overloaded if too
        many images are waiting.
        """
        started_at = time.monotonic()
        found = [self._read(source, settings, times) for source in sources]
        times.total_s += time.monotonic() - started_at
        return found

    def _read(
        self, source: ImageSource, settings: ProcessorSettings, times: ImageTimes
    ) -> ProcessedImage:
        data, digest = self._loaded(source)
        key = f"{digest} {hashlib.sha256(msgspec.json.encode(settings)).hexdigest()}"
        times.num_images += 1
        while True:
            if (image := self._cache.get(key)) is not None:
                times.num_hits += 1
                return image
            if (pending := self._pending.get(key)) is None:
                break
            pending.wait()
        self._pending[key] = done = AsyncResult()
        try:
            image = self._processed(data, source, settings, times)
            self._cache.put(key, image)
            return image
        finally:
            del self._pending[key]
            done.set()

    def _loaded(self, source: ImageSource) -> tuple[bytes, str]:
        """Return the bytes of an image and their SHA-256."""
        if source.problem is not None:
            raise source.problem
        if source.url.lower().startswith("http"):
            source = ImageSource(source.param, data=self._fetcher.fetch(source))

        def work() -> tuple[bytes, str]:
            data = decoded_bytes(source)
            return data, hashlib.sha256(data).hexdigest()

        size = len(source.url) + len(source.base64) + len(source.data)
        return work() if size < _INLINE_BYTES else self._offload(work)

    def _processed(
        self, file: bytes, source: ImageSource, settings: ProcessorSettings, times: ImageTimes
    ) -> ProcessedImage:
        try:
            reply, raw = self._process.full_reply(frame_of(ProcessImage(settings), [file]))
        except LimitExceeded as error:
            raise InvalidImage.at(source.param, f"the image is refused: {error}") from None
        if isinstance(reply, CallFailed):
            raise InvalidImage.at(source.param, reply.message)
        assert isinstance(reply, ImageProcessed)
        times.decode_s += reply.decode_s
        times.preprocess_s += reply.preprocess_s
        tensors, place = [], 0
        for head in reply.tensors:
            data = UInt8(raw[place : place + head.num_bytes])
            tensors.append(
                AttachedTensor(name=head.name, dtype=head.dtype, shape=head.shape, data=data)
            )
            place += head.num_bytes
        return ProcessedImage(reply.digest, tensors, ImageFacts(reply.numbers, reply.shapes))


class ImageCache:
    """Preprocessed images, at most `max_bytes` of tensors. The least recently used ones are dropped
    first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[str, ProcessedImage] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: str) -> ProcessedImage | None:
        image = self._images.get(key)
        if image is not None:
            self._images.move_to_end(key)
        return image

    def put(self, key: str, image: ProcessedImage) -> None:
        """Add an image that is not in the cache."""
        self._images[key] = image
        self.num_bytes += image.num_bytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._images.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
