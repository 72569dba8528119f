"""The wire format: golden bytes of every message, refusals, and large arrays that are not copied.

After an intended change of the format, write the golden bytes anew with `python -m
tests.unit.test_wire` and review the difference.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest

from protocol.engine import messages
from protocol.engine.encoding import MAX_STEP_INPUTS
from protocol.engine.grammar import Body, Form
from protocol.engine.messages import Generate, Message, Output, Outputs
from protocol.wire import codec
from protocol.wire.arrays import Float32, Int32
from protocol.wire.errors import WireError
from protocol.worker.kv_peers import Offer
from tests.support.samples import DIRECTIONS, KINDS, MESSAGES, SAMPLES

GOLDEN = Path(__file__).parents[1] / "data" / "wire"


def tag_of(kind: type[Message]) -> str:
    return str(kind.__struct_config__.tag)


def sample_id(message: Message) -> str:
    kind = type(message)
    return f"{tag_of(kind)}-{SAMPLES[kind].index(message)}"


def direction_of(message: Message) -> Any:
    return next(union for union in DIRECTIONS if type(message) in get_args(union))


def unpacked(frame: bytes) -> dict[str, Any]:
    return msgpack.unpackb(frame[1:], strict_map_key=False)


def joined(frames: list[Any]) -> bytes:
    return b"".join(len(frame).to_bytes(4, "little") + bytes(frame) for frame in frames)


def golden_of(kind: type[Message]) -> bytes:
    return b"".join(joined(codec.encode(sample)) for sample in SAMPLES[kind])


def structs_in(value: Any) -> Iterator[msgspec.Struct]:
    """Yield every struct inside `value`."""
    if isinstance(value, msgspec.Struct):
        yield value
        value = msgspec.structs.astuple(value)
    if isinstance(value, dict):
        value = tuple(value.values())
    for item in value if isinstance(value, list | tuple) else ():
        yield from structs_in(item)


def test_every_kind_of_message_has_a_direction() -> None:
    assert sorted(map(tag_of, KINDS)) == sorted(map(tag_of, Message.__subclasses__()))


def test_the_samples_contain_every_struct_and_set_every_field() -> None:
    """A field with its default value is not encoded, so the golden bytes would not show that it was
    renamed."""
    unset: dict[type, set[str]] = {}
    for struct in structs_in(MESSAGES):
        defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
        same = {name for name, value in defaults.items() if getattr(struct, name) == value}
        unset[type(struct)] = unset.get(type(struct), same) & same
    assert {kind: fields for kind, fields in unset.items() if fields} == {}
    assert set(get_args(Body) + get_args(Form) + get_args(Offer)) <= unset.keys()


@pytest.mark.parametrize("kind", KINDS, ids=tag_of)
def test_the_bytes_of_a_message_do_not_change(kind: type[Message]) -> None:
    assert golden_of(kind) == (GOLDEN / f"{tag_of(kind)}.bin").read_bytes()


@pytest.mark.parametrize("message", MESSAGES, ids=sample_id)
def test_a_decoded_message_equals_the_sent_one(message: Message) -> None:
    decoder: codec.Decoder[Message] = codec.Decoder(direction_of(message))
    assert decoder.decode(codec.encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=sample_id)
def test_a_message_on_the_wrong_socket_is_refused(message: Message) -> None:
    for union in DIRECTIONS:
        if type(message) not in get_args(union):
            with pytest.raises(WireError, match="kind"):
                codec.Decoder(union).decode(codec.encode(message))


def test_all_requests_that_a_step_encodes_can_end_in_one_message() -> None:
    vectors = Float32.of([0.5] * (codec.INLINE_BYTES // 4 + 1), (1, codec.INLINE_BYTES // 4 + 1))
    ends = [
        Output(request=number, tokens=[], finish="stop", vectors=vectors)
        for number in range(MAX_STEP_INPUTS)
    ]
    frames = [bytes(frame) for frame in codec.encode(Outputs(step=1, outputs=ends))]
    assert len(frames) == 1 + MAX_STEP_INPUTS
    assert codec.Decoder(messages.ToClient).decode(frames) == Outputs(step=1, outputs=ends)


def test_the_plain_msgpack_package_reads_our_frames() -> None:
    frames = codec.encode(Generate(request=7, prompt=Int32.of([1, 258])))
    assert frames[0][0] == codec.WIRE_VERSION
    fields = unpacked(frames[0])
    assert (fields["kind"], fields["request"]) == ("generate", 7)
    assert fields["prompt"].data == b"\x01\x01\x02\x00\x00\x00" + b"\x01\0\0\0\x02\x01\0\0"


def test_a_large_array_is_a_frame_of_its_own_and_not_copied() -> None:
    prompt = Int32.of(range(5000))
    frames = codec.encode(Generate(request=7, prompt=prompt))
    assert len(frames) == 2
    assert frames[1].obj is prompt.data.obj
    received = [bytes(frame) for frame in frames]
    message: Any = codec.Decoder[Any](messages.ToEngine).decode(received)
    assert message.prompt.data.obj is received[1]
    assert message.prompt == prompt


def test_fields_of_a_newer_version_are_tolerated() -> None:
    frame = codec.encode(messages.Accepted(request=3))[0]
    newer = msgpack.packb(unpacked(frame) | {"mood": "good"})
    decoded = codec.Decoder[Any](messages.ToClient).decode([frame[:1] + newer])
    assert decoded == messages.Accepted(request=3)


def prompt_as(value: Any) -> list[bytes]:
    return [b"\x01" + msgpack.packb({"kind": "generate", "request": 1, "prompt": value})]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x01"],
        [b"\x02\x80"],
        [b"\x01\x80"],
        [b"x"] * 65,
        prompt_as([1, 2]),
        prompt_as(None),
        prompt_as(msgpack.ExtType(9, b"\x01\x01\0\0\0\0")),
        prompt_as(msgpack.ExtType(1, b"")),
        prompt_as(msgpack.ExtType(1, b"\x01\x01\x02\0\0\0aaaa")),
        prompt_as(msgpack.ExtType(1, b"\x02\x01\x01\0\0\0aaaa")),
        prompt_as(msgpack.ExtType(1, b"\x01\x00")),
        prompt_as(msgpack.ExtType(1, b"\x01\x02\x01\0\0\0\x01\0\0\0aaaa")),
        prompt_as(msgpack.ExtType(2, b"\x01\x01\x05\0\0\0\x01\0\0\0")),
        prompt_as(msgpack.ExtType(2, b"\x01\x01\x05\0\0\0")),
        [*prompt_as(msgpack.ExtType(2, b"\x01\x01\x05\0\0\0\x00\0\0\0")), b"a" * 20],
        [*prompt_as(msgpack.ExtType(2, b"\x01\x01\xff\xff\xff\xff\x01\0\0\0")), b"a" * 20],
        [b"\x01" + b"\x91" * 5000],
    ],
)
def test_a_malformed_message_is_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        codec.Decoder(messages.ToEngine).decode(frames)


def test_an_oversized_message_is_refused_before_it_is_decoded(monkeypatch: Any) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(WireError, match="limit"):
        codec.Decoder(messages.ToEngine).decode([b"\x01" + b"a" * 100])


def test_mutated_frames_raise_wire_errors_only() -> None:
    """Decoding each of 20,000 damaged messages raises WireError, or returns a valid message."""
    dice = random.Random(5)
    samples = [[bytes(frame) for frame in codec.encode(message)] for message in MESSAGES]
    decoders = [codec.Decoder[Any](union) for union in DIRECTIONS]
    survived = 0
    for _ in range(20_000):
        frames = [bytearray(frame) for frame in dice.choice(samples)]
        damage(dice, frames)
        try:
            dice.choice(decoders).decode([bytes(frame) for frame in frames])
            survived += 1
        except WireError:
            pass
    assert 0 < survived < 10_000


def damage(dice: random.Random, frames: list[bytearray]) -> None:
    frame = dice.choice(frames)
    for _ in range(dice.randrange(1, 4)):
        position = dice.randrange(1, len(frame)) if len(frame) > 1 else 0
        match dice.randrange(4):
            case 0:
                frame[position] = dice.randrange(256)
            case 1:
                del frame[position:]
            case 2:
                frame[position:position] = dice.randbytes(dice.randrange(1, 9))
            case 3:
                frame[position] ^= 1 << dice.randrange(8)
        if not frame:
            return


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for message_kind in KINDS:
        (GOLDEN / f"{tag_of(message_kind)}.bin").write_bytes(golden_of(message_kind))
