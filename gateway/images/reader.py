"""Decodes and preprocesses images in a sandbox process, and keeps the results.

They are kept by the SHA-256 of the image's bytes, so that an image of a conversation is processed
once, however many turns follow. Several requests with the same new image wait for one call.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from gevent.event import AsyncResult
from gevent.lock import BoundedSemaphore

from gateway.images.families import ImageFacts
from gateway.images.limits import MAX_FETCH_S, MAX_LOADED_BYTES, MAX_PROCESS_S
from gateway.images.memory import RETRY_S, FileMemory, Grow, ImageMemory, ProcessedImage
from gateway.images.settings import ProcessorSettings
from gateway.images.source import FileLoader, ImageSource, decoded_bytes, no_files
from gateway.sandbox.messages import (
    CallFailed,
    ImageProcessed,
    LoadProcessor,
    ProcessImage,
)
from gateway.sandbox.process import LimitExceeded, SandboxProcess, frame_of
from protocol.engine.attachments import AttachedTensor
from protocol.wire.arrays import UInt8
from protocol.wire.errors import InvalidImage, Overloaded

CPU_S = 20.0
"""CPU time limit of one image. The first one also loads transformers, which takes 2 s."""
MEMORY_BYTES = 2 << 30
RETIRE_BYTES = 1 << 30
MAX_WAITING = 32
"""Maximum number of images that wait for the process. Further ones are refused."""
MAX_BYTES = 512 << 20
"""Default memory of the preprocessed images in a gateway process."""
_INLINE_BYTES = 1 << 18
"""Larger images are decoded from base64 and hashed in a thread."""


@dataclass(slots=True)
class ImageTimes:
    """What the images of a request cost."""

    num_images: int = 0
    #: Images that had been preprocessed before.
    num_hits: int = 0
    #: Seconds until images with http(s): URLs were loaded.
    fetch_s: float = 0.0
    #: Seconds of the process for decoding, and for preprocessing.
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    #: Seconds until all images were ready, with loading and waiting.
    total_s: float = 0.0


class ImageFetcher(Protocol):
    """Loads the bytes of images that are elsewhere."""

    def fetch(self, source: ImageSource, grow: Grow) -> bytes:
        """Return the bytes of an image with an http(s): URL. `grow` is called before each part of
        them is kept. Raises InvalidImage, and what `grow` raises."""


class ImageReader:
    """Reads the images of requests for all models of a gateway process.

    fetcher    loads images with http(s): URLs
    offload    runs a function in a thread
    max_bytes  memory of the preprocessed images
    """

    def __init__(
        self,
        fetcher: ImageFetcher,
        *,
        offload: Callable[[Callable[[], tuple[bytes, str]]], tuple[bytes, str]],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._fetcher = fetcher
        self._offload = offload
        #: Held by the image that a thread decodes from base64. Several threads would not be faster,
        #: as they need the interpreter's lock, and would each delay all other requests.
        self._decoding = BoundedSemaphore(1)
        self._process = SandboxProcess(
            cpu_s=CPU_S,
            memory_bytes=MEMORY_BYTES,
            retire_bytes=RETIRE_BYTES,
            wall_s=3 * CPU_S,
            max_waiting=MAX_WAITING,
            queued="images are waiting to be decoded",
        )
        self.memory = ImageMemory(max_bytes)
        self._files = FileMemory(MAX_LOADED_BYTES)
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
        self,
        sources: Sequence[ImageSource],
        settings: ProcessorSettings,
        times: ImageTimes,
        files: FileLoader = no_files,
    ) -> list[ProcessedImage]:
        """Return the preprocessed images, and add what they cost to `times`. `files` loads those
        that are uploaded files.

        Raises InvalidImage, naming the field, if an image cannot be used or if the images cost
        too much together, and Overloaded if too many images are waiting or in use.
        """
        started_at = time.monotonic()
        found: list[ProcessedImage] = []
        for source in sources:
            with self._files.file() as grow:
                image = self._read(self._loaded(source, times, files, grow), settings, times, found)
            found.append(image)
        times.total_s += time.monotonic() - started_at
        return found

    def _read(
        self,
        source: ImageSource,
        settings: ProcessorSettings,
        times: ImageTimes,
        before: Sequence[ProcessedImage],
    ) -> ProcessedImage:
        """Return an image. `before` are those that the request has before it."""
        data, digest = self._decoded(source)
        key = f"{digest} {hashlib.sha256(msgspec.json.encode(settings)).hexdigest()}"
        times.num_images += 1
        while True:
            if (image := self.memory.get(key)) is not None:
                times.num_hits += 1
                return image
            if (pending := self._pending.get(key)) is None:
                break
            pending.wait()
        self._pending[key] = done = AsyncResult()
        try:
            image = self._processed(data, source, settings, times)
            if not self.memory.put(key, image):
                raise self._no_memory(source, [*before, image])
            return image
        finally:
            del self._pending[key]
            done.set()

    def _no_memory(self, source: ImageSource, own: Sequence[ProcessedImage]) -> Exception:
        """Return the error of a request whose images, `own`, do not fit in the memory."""
        limit = self.memory.max_bytes
        if sum(each.num_bytes for each in {id(each): each for each in own}.values()) > limit:
            return InvalidImage.at(
                source.param,
                f"the images up to this one need more than {limit >> 20:,} MiB, which is the most "
                "for preprocessed images; send fewer images, or smaller ones",
            )
        return Overloaded(
            f"the images of open requests fill the {limit >> 20:,} MiB for them; try again later",
            retry_after_s=RETRY_S,
        )

    def _loaded(
        self, source: ImageSource, times: ImageTimes, files: FileLoader, grow: Grow
    ) -> ImageSource:
        """Return an image whose content is in memory: its bytes, or base64."""
        if source.problem is not None:
            raise source.problem
        if source.file_id:
            data = files(source)
            grow(len(data))
        elif source.url.lower().startswith("http"):
            if times.fetch_s > MAX_FETCH_S:
                raise _too_slow(source, "load", times.fetch_s, MAX_FETCH_S)
            started_at = time.monotonic()
            data = self._fetcher.fetch(source, grow)
            times.fetch_s += time.monotonic() - started_at
        else:
            return source
        return ImageSource(source.param, data=data)

    def _decoded(self, source: ImageSource) -> tuple[bytes, str]:
        """Return the bytes of an image and their SHA-256."""

        def work() -> tuple[bytes, str]:
            data = decoded_bytes(source)
            return data, hashlib.sha256(data).hexdigest()

        size = len(source.url) + len(source.base64) + len(source.data)
        if size < _INLINE_BYTES:
            return work()
        with self._decoding:
            return self._offload(work)

    def _processed(
        self, file: bytes, source: ImageSource, settings: ProcessorSettings, times: ImageTimes
    ) -> ProcessedImage:
        if (spent_s := times.decode_s + times.preprocess_s) > MAX_PROCESS_S:
            raise _too_slow(source, "decode and preprocess", spent_s, MAX_PROCESS_S)
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


def _too_slow(source: ImageSource, task: str, spent_s: float, max_s: float) -> InvalidImage:
    """Return the error of an image whose predecessors in the request took too long."""
    return InvalidImage.at(
        source.param,
        f"the images before this one took {spent_s:.0f} s to {task}; the limit for the images of "
        f"a request is {max_s:g} s; send fewer images, or smaller ones",
    )
