"""The content of attachments: the tensors that clients have sent, until the worker encodes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine_core.requests.request import Request
from protocol.engine.attachments import AttachedTensor, Attachment
from protocol.wire.errors import AttachmentMissing, InvalidRequest, Overloaded

MAX_REJECTED = 1024
RETRY_S = 5.0


@dataclass(slots=True)
class HeldContent:
    """The tensors of one attachment. A replayed journal has their size, but not the tensors."""

    tensors: list[AttachedTensor]
    num_bytes: int
    #: Number of rows that the encoder makes of it, as the first request said; 0: none has.
    num_rows: int = 0


@dataclass(slots=True)
class AttachmentContent:
    """Content by digest, with at most `max_bytes` together. Content that open requests need is
    never dropped; the rest is dropped in the order of its last use."""

    max_bytes: int
    num_bytes: int = 0
    #: The content that was used last is the last.
    held: dict[str, HeldContent] = field(default_factory=dict)
    #: Digest -> the open requests that need the content, at least one.
    users: dict[str, set[Request]] = field(default_factory=dict)
    #: Digests of content that was not kept, because open requests needed the memory.
    rejected: dict[str, None] = field(default_factory=dict)

    def add(self, digest: str, tensors: list[AttachedTensor], num_bytes: int) -> None:
        """Keep the content, and drop other content to make room for it."""
        self.rejected.pop(digest, None)
        if digest in self.held:
            self._use(digest)
            return
        unneeded = [key for key in self.held if key not in self.users]
        while self.num_bytes + num_bytes > self.max_bytes and unneeded:
            self._drop(unneeded.pop(0))
        if self.num_bytes + num_bytes > self.max_bytes:
            self.rejected[digest] = None
            if len(self.rejected) > MAX_REJECTED:
                del self.rejected[next(iter(self.rejected))]
            return
        self.held[digest] = HeldContent(tensors, num_bytes)
        self.num_bytes += num_bytes

    def check(self, attachments: Iterable[Attachment]) -> None:
        """Raise AttachmentMissing if the content of an attachment is not held, Overloaded if there
        was no memory for it, and InvalidRequest if another request said that it has another number
        of tokens."""
        for number, attachment in enumerate(attachments):
            if attachment.digest in self.rejected:
                raise Overloaded(
                    f"the images of open requests fill the {self.max_bytes >> 20:,} MiB for them; "
                    "try again later",
                    retry_after_s=RETRY_S,
                )
            if attachment.digest not in self.held:
                raise AttachmentMissing(f"the engine does not have image {attachment.digest[:12]}")
            num_rows = self.held[attachment.digest].num_rows
            if num_rows not in (0, attachment.num_tokens):
                raise InvalidRequest.at(
                    f"attachments[{number}]",
                    f"must have {num_rows:,} tokens; got {attachment.num_tokens:,}",
                )

    def add_user(self, request: Request) -> None:
        """Keep the content of the request's images until `remove_user`."""
        for image in request.images:
            self.users.setdefault(image.digest, set()).add(request)
            self._use(image.digest)
            if image.digest in self.held:
                self.held[image.digest].num_rows = image.num_tokens

    def remove_user(self, request: Request) -> None:
        for image in request.images:
            users = self.users.get(image.digest, set())
            users.discard(request)
            if not users:
                self.users.pop(image.digest, None)

    def tensors(self, digest: str) -> Sequence[AttachedTensor]:
        return self.held[digest].tensors

    def drop(self, digest: str) -> None:
        """Drop content that cannot be encoded, so that no later request gets it."""
        if digest in self.held:
            self._drop(digest)

    def _use(self, digest: str) -> None:
        if digest in self.held:
            self.held[digest] = self.held.pop(digest)

    def _drop(self, digest: str) -> None:
        self.num_bytes -= self.held.pop(digest).num_bytes
