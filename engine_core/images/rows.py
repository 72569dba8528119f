"""The rows of images: which ones the worker has encoded, encodes, and keeps.

The worker encodes beside its steps, one image after another, and keeps the rows by digest. The
engine decides which image is encoded next, and which rows are dropped for it. It sends EncodeImage
and DropImages in the order of the plans, so the worker has the rows of each plan that it gets.

A request needs the rows of an image from the time it has a slot until it has computed all their
positions. Needed rows are not dropped. Images are encoded in the order of the requests' ranks and,
within a request, of their positions. So the first image of the oldest request is ready first, that
request can go on, and the rows that it no longer needs make room for the next image.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine_core.images.content import AttachmentContent
from engine_core.requests.request import Request, RequestPhase
from protocol.worker.steps import DropImages, EncodeImage

MAX_ENCODING = 2
"""Most images that the worker has to encode at a time: one, and the next one."""

ImageCommand = EncodeImage | DropImages


@dataclass(slots=True)
class ImageRows:
    """Rows by digest, at most `max_rows` together. 0: the worker reads no images."""

    max_rows: int
    content: AttachmentContent
    #: Digest -> number of rows that the worker has, or is encoding. The last used is the last.
    kept: dict[str, int] = field(default_factory=dict)
    #: The digests of `kept` that are not encoded yet, in the order of their commands.
    encoding: list[str] = field(default_factory=list)
    num_encoded: int = 0
    num_encoded_rows: int = 0
    #: Number of images whose rows were there already when a request needed them.
    num_hits: int = 0
    encode_s: float = 0.0
    _commands: list[ImageCommand] = field(default_factory=list)

    def num_computable(self, request: Request) -> int:
        """Return the end of the positions that the request can compute: those before the first
        image whose rows are not ready."""
        for image in request.images:
            if image.end > request.num_scheduled and not self.is_ready(image.digest):
                return image.first
        return len(request.tokens) + request.num_pending

    def is_held_back(self, request: Request) -> bool:
        """Return whether the next position of the request belongs to an image that is not ready."""
        return bool(request.images) and self.num_computable(request) <= request.num_scheduled

    def note_waits(self, running: Iterable[Request]) -> None:
        """Record in the timers of running requests with images whether they wait for one."""
        for request in running:
            if request.images:
                is_idle = request.num_scheduled == request.num_computed
                is_waiting = is_idle and self.is_held_back(request)
                request.stage_timer.note_image_wait(is_waiting=is_waiting)

    @property
    def num_kept_rows(self) -> int:
        """Number of rows that the worker has, or is encoding."""
        return sum(self.kept.values())

    def is_ready(self, digest: str) -> bool:
        return digest in self.kept and digest not in self.encoding

    def encode_next(self, requests: Sequence[Request]) -> None:
        """Start to encode the images that `requests` need first. They are those with a slot, in the
        order of their ranks."""
        while len(self.encoding) < MAX_ENCODING:
            needed = _needed(requests)
            image = next((image for image in needed if image not in self.kept), None)
            if image is None or not self._make_room(needed[image], needed):
                return
            self.kept[image] = needed[image]
            self.encoding.append(image)
            command = EncodeImage(
                digest=image, tensors=list(self.content.tensors(image)), num_rows=needed[image]
            )
            self._commands.append(command)

    def on_admitted(self, request: Request) -> None:
        """Count the images of an admitted request whose rows are kept already, and use them."""
        for image in request.images:
            if image.end > request.num_computed and self.is_ready(image.digest):
                self.num_hits += 1
                self.kept[image.digest] = self.kept.pop(image.digest)

    def on_encoded(self, digest: str, encode_s: float, *, has_failed: bool) -> None:
        """Apply the worker's report on the oldest image that it encodes. Raises RuntimeError if it
        is about another one."""
        if not self.encoding or self.encoding[0] != digest:
            raise RuntimeError(f"the worker reports image {digest[:12]}, which is not the next one")
        del self.encoding[0]
        if has_failed:
            del self.kept[digest]
            self.content.drop(digest)
            return
        self.num_encoded += 1
        self.num_encoded_rows += self.kept[digest]
        self.encode_s += encode_s

    def drain_commands(self) -> list[ImageCommand]:
        commands, self._commands = self._commands, []
        return commands

    def _make_room(self, num_rows: int, needed: Iterable[str]) -> bool:
        """Drop rows that no request needs, until there is room. Return False, without dropping any,
        if there would be too little."""
        needed = {*needed, *self.encoding}
        unneeded = [digest for digest in self.kept if digest not in needed]
        missing = self.num_kept_rows + num_rows - self.max_rows
        if missing > sum(self.kept[digest] for digest in unneeded):
            return False
        dropped = []
        while missing > 0:
            dropped.append(unneeded.pop(0))
            missing -= self.kept.pop(dropped[-1])
        if dropped:
            self._commands.append(DropImages(digests=dropped))
        return True


def _needed(requests: Iterable[Request]) -> dict[str, int]:
    """Return digest -> number of rows of the images that the requests need, in their order.
    Requests that have ended in flight need none. Neither do those whose K/V is being fetched: it
    covers the images, unless the fetch fails."""
    return {
        image.digest: image.num_tokens
        for request in requests
        if request.phase not in (RequestPhase.FINISHED, RequestPhase.FETCHING)
        for image in request.images
        if image.end > request.num_scheduled
    }
