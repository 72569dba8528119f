"""Random changes of valid messages: mostly of their structure, else of their bytes or frames.

`Nonsense` decodes each changed message as its receiver would, so the number of messages that the
receiver must refuse is known exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any, get_args

import msgpack

from protocol.engine.messages import Message
from protocol.wire import codec
from protocol.wire.errors import WireError
from tests.support.samples import SAMPLES
from tests.torture.fuzz.outcome import Outcome
from tests.torture.fuzz.values import changed, damaged

Frames = list[bytes]


class Nonsense:
    """An endless iterable of changed messages.

    direction   the union of messages that the receiver decodes
    never       kinds of messages that are skipped if they are still valid after the changes, for
                example because they would end the process under test
    """

    def __init__(self, direction: Any, chance: Random, never: tuple[type[Message], ...] = ()):
        self._chance = chance
        self._never = never
        self._decoder: codec.Decoder[Message] = codec.Decoder(direction)
        kinds = get_args(direction)
        samples = {kind: [_as_bytes(m) for m in own] for kind, own in SAMPLES.items()}
        self._own = [samples[kind] for kind in samples if kind in kinds]
        self._strange = [samples[kind] for kind in samples if kind not in kinds]

    def __iter__(self) -> Iterator[tuple[Frames, Message | None]]:
        """Yield frames, and the message that their receiver decodes; None if they are malformed."""
        while True:
            frames = self._frames()
            message = self._read(frames)
            if not isinstance(message, self._never):
                yield frames, message

    def _read(self, frames: Frames) -> Message | None:
        try:
            return self._decoder.decode(frames)
        except WireError:
            return None

    def _frames(self) -> Frames:
        chance = self._chance
        kinds = self._own if chance.random() < 0.9 else self._strange
        frames = list(chance.choice(chance.choice(kinds)))
        for _ in range(chance.choice([1, 1, 2, 3])):
            frames = self._changed(frames) or [b""]
        return frames

    def _changed(self, frames: Frames) -> Frames:
        chance = self._chance
        what = chance.random()
        if what < 0.55:
            return [_restructured(frames[0], chance), *frames[1:]]
        at = chance.randrange(len(frames))
        if what < 0.9:
            return [*frames[:at], damaged(frames[at], chance), *frames[at + 1 :]]
        if what < 0.94:
            return [*frames[:at], *frames[at + 1 :]]
        if what < 0.98:
            return [*frames[:at], chance.randbytes(chance.choice([0, 1, 9, 5000])), *frames[at:]]
        return frames * chance.choice([2, 70])


BATCH = 250


def batches(nonsense: Nonsense, count: int, outcome: Outcome) -> Iterator[list[Frames]]:
    """Yield batches of messages until `outcome.sent` is `count`. Each batch is added to `outcome`
    before it is yielded."""
    drawn = iter(nonsense)
    while outcome.sent < count:
        batch = list(islice(drawn, min(BATCH, count - outcome.sent)))
        outcome.sent += len(batch)
        outcome.malformed += sum(message is None for _, message in batch)
        yield [frames for frames, _ in batch]


def _as_bytes(message: Message) -> Frames:
    return [bytes(frame) for frame in codec.encode(message)]


def _restructured(frame: bytes, chance: Random) -> bytes:
    """Return the frame with a change in its MessagePack value, or in its bytes if this value cannot
    be read or written."""
    try:
        value = msgpack.unpackb(frame[1:], strict_map_key=False)
        return frame[:1] + msgpack.packb(changed(value, chance))
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return damaged(frame, chance)
