"""The images of the echo worker (engines.py): it sees a number of its own for each row of an image.

So a token that was sampled after the rows of another image is wrong. A row's number also depends
on the length of its run, as its K/V does in models whose images are computed as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from protocol.engine.attachments import Attachment, ImageSupport
from protocol.worker.steps import DropImages, EncodeImage, ImageEncoded, StepPlan

PLACEHOLDER = 96
FIRST_ROW = 1000
"""Least number of a row, more than any token."""


def echo_images_card(*, sees_whole_runs: bool = False) -> ImageSupport:
    return ImageSupport(model_type="echo", token_id=PLACEHOLDER, sees_whole_runs=sees_whole_runs)


def image_of(name: str, *runs: tuple[int, int]) -> Attachment:
    """Return an image at `runs`. Its content depends on the name and the number of rows."""
    num_rows = sum(count for _, count in runs)
    digest = sha256(f"{name} {num_rows}".encode()).hexdigest()
    return Attachment(digest=digest, kind="image", runs=list(runs))


def row_number(digest: str, row: int, run: int) -> int:
    name = f"{digest} {row} {run}"
    return FIRST_ROW + int.from_bytes(sha256(name.encode()).digest()[:3], "big")


def with_rows(tokens: Sequence[int], images: Iterable[Attachment]) -> list[int]:
    """Return the tokens with the rows of the images in their places."""
    seen = list(tokens)
    for image in images:
        places = [(at, count) for first, count in image.runs for at in range(first, first + count)]
        for row, (position, run) in enumerate(places):
            if position < len(seen):
                seen[position] = row_number(image.digest, row, run)
    return seen


@dataclass
class EchoImages:
    """The images that the worker has to encode, and those whose rows it keeps."""

    waiting: deque[EncodeImage] = field(default_factory=deque)
    rows: dict[str, int] = field(default_factory=dict)
    slots: dict[int, list[Attachment]] = field(default_factory=dict)
    num_encoded: int = 0
    sees_whole_runs: bool = False

    def apply(self, commands: Iterable[EncodeImage | DropImages], plan: object) -> None:
        """Receive commands and the plan after them."""
        for command in commands:
            if isinstance(command, EncodeImage):
                assert command.digest not in self.rows, "an image is encoded twice"
                self.waiting.append(command)
                continue
            for digest in command.digests:
                del self.rows[digest]
        if isinstance(plan, StepPlan):
            self.slots |= {init.slot: init.images for init in plan.bind}
            columns = (plan.row_slots, plan.row_starts, plan.row_tokens)
            for slot, start, count in zip(*(each.tolist() for each in columns), strict=True):
                self._check_row(self.slots[slot], start, start + count)

    def encode_next(self, error: str = "") -> ImageEncoded | None:
        """Encode the oldest image, or fail with `error`. Return None if there is none."""
        if not self.waiting:
            return None
        image = self.waiting.popleft()
        if not error:
            self.rows[image.digest] = image.num_rows
            self.num_encoded += 1
        return ImageEncoded(digest=image.digest, encode_s=0.5, error=error)

    def _check_row(self, images: Iterable[Attachment], start: int, end: int) -> None:
        """Check that a row of a step has the images of the positions that it computes."""
        for image in images:
            spans = [(first, first + count) for first, count in image.runs]
            computed = [(low, high) for low, high in spans if low < end and start < high]
            if computed:
                assert self.rows.get(image.digest) == image.num_tokens, "an image is not encoded"
            if self.sees_whole_runs:
                cut = [(low, high) for low, high in computed if low < start or end < high]
                assert not cut, f"a step computes {start} to {end} and cuts {cut}"
