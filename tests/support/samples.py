"""Generated samples of every message kind, for golden bytes, round trips and fuzzing.

The samples of a kind together contain every arm of every union and every value of every `Literal`
(`KVChunk`, whose bytes must fill a frame of their own, is written by hand). The first sample sets
every field to another value than its default. Each later sample sets only required fields and those
that have another arm to show.

A value depends only on its struct and field, such as "SamplingParams.seed". So a new field changes
no value of another field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args
from zlib import crc32

import msgspec
from msgspec import inspect

from protocol.engine import messages
from protocol.engine.attachments import ITEM_BYTES, AttachedTensor, Attachment, attachment_digest
from protocol.engine.encoding import EncodeInputs
from protocol.engine.messages import Message
from protocol.sdk import offline_messages
from protocol.wire.arrays import Array, Float32, Int32, UInt8
from protocol.worker import kv_peers, steps

DIRECTIONS = (
    messages.ToEngine,
    messages.ToClient,
    steps.ToWorker,
    steps.FromWorker,
    kv_peers.FromReader,
    kv_peers.FromExporter,
    offline_messages.ToText,
    offline_messages.FromText,
)
KINDS: list[type[Message]] = [kind for union in DIRECTIONS for kind in get_args(union)]

TENSORS = [
    AttachedTensor(name=dtype, dtype=dtype, shape=[1, 2], data=UInt8(bytes(2 * size)))
    for dtype, size in ITEM_BYTES.items()
]
BY_HAND: dict[type, Any] = {
    AttachedTensor: TENSORS[0],
    messages.AttachData: messages.AttachData(digest=attachment_digest(TENSORS), tensors=TENSORS),
    Attachment: Attachment(digest="0f" * 32, kind="image", runs=[(0, 2)], grid=(1, 2, 1)),
    EncodeInputs: EncodeInputs(
        tokens=Int32.of([5, 6, 7]), lengths=Int32.of([1, 2]), splits=Int32.of([1, 1])
    ),
    kv_peers.KVChunk: kv_peers.KVChunk(
        chunk=7, crc32=0xFFFFFFFF, data=UInt8(bytes(range(256)) * 20)
    ),
}
"""Structs whose values depend on each other or on limits that no type declares."""


def _values(kind: inspect.Type, path: str, outer: tuple[type, ...] = ()) -> list[Any]:
    """Return one value for each arm of a type.

    path    the struct and the field to which the type belongs
    outer   the structs around the value. A struct that may contain itself does so once
    """
    match kind:
        case inspect.UnionType(types=arms):
            if any(_cls(arm) in outer for arm in arms):
                arms = tuple(arm for arm in arms if not _may_contain(arm, arms))
            inner = [arm for arm in arms if not isinstance(arm, inspect.NoneType)]
            return [value for arm in inner for value in _values(arm, path, outer)]
        case inspect.StructType():
            return list(_structs(kind, outer))
        case inspect.LiteralType(values=values):
            return list(values)
        case inspect.BoolType():
            return [True, False]
        case inspect.ListType(item_type=item, max_length=most):
            return [_values(item, f"{path}[]", outer)[:most]]
        case inspect.VarTupleType(item_type=item, max_length=most):
            return [tuple(_values(item, f"{path}[]", outer)[:most])]
        case inspect.DictType(key_type=key, value_type=item, max_length=most):
            items = _values(item, f"{path}{{}}", outer)[:most]
            return [{_values(key, f"{path}{at}")[0]: value for at, value in enumerate(items)}]
        case inspect.TupleType(item_types=kinds):
            return [tuple(_values(item, f"{path}.{at}")[0] for at, item in enumerate(kinds))]
        case _:
            return [_scalar(kind, path)]


def _structs(kind: inspect.StructType, outer: tuple[type, ...]) -> Iterator[Any]:
    if kind.cls in BY_HAND:
        yield BY_HAND[kind.cls]
        return
    values = {}
    for field in kind.fields:
        of_field = _values(field.type, f"{kind.cls.__name__}.{field.name}", (*outer, kind.cls))
        values[field.name] = [value for value in of_field if value != _default(field)]
    needed = {field.name for field in kind.fields if field.required}
    for number in range(max([1, *map(len, values.values())])):
        sample = {name: own[number % len(own)] for name, own in values.items()}
        shown = {name for name, own in values.items() if number < len(own)}
        try:
            yield kind.cls(**{name: sample[name] for name in shown | needed})
        except ValueError:  # a value of these fields needs another field
            yield kind.cls(**sample)


def _default(field: inspect.Field) -> Any:
    make = field.default_factory
    return field.default if make is msgspec.NODEFAULT else make()


def _scalar(kind: inspect.Type, path: str) -> Any:
    number = crc32(path.encode())
    match kind:
        case inspect.IntType(ge=least, le=most):
            lowest = 2 if least is None else least + 1
            return lowest + number % min(90, most - lowest if most is not None else 90)
        case inspect.FloatType(ge=least, gt=above, le=most):
            start, end = least or above or 0.0, 64.0 if most is None else most
            return start + (end - start) * (number % 31 + 1) / 64
        case inspect.StrType(pattern=str()):  # the only pattern is that of a digest
            return f"{number:08x}" * 8
        case inspect.StrType():
            return f"{path.rpartition('.')[2]} {number % 90}"
        case inspect.BytesType():
            return number.to_bytes(4, "big") * 4
        case inspect.CustomType(cls=cls) if issubclass(cls, Array):
            return cls.of([number % 90, number % 7], (1, 2) if cls is Float32 else None)
    raise TypeError(f"no sample for {path}, which is {kind}")


def _cls(kind: inspect.Type) -> type | None:
    return kind.cls if isinstance(kind, inspect.StructType) else None


def _may_contain(kind: inspect.Type, others: tuple[inspect.Type, ...]) -> bool:
    """Whether a field of `kind`, or an item of a field, may be one of `others`."""
    fields = kind.fields if isinstance(kind, inspect.StructType) else ()
    held = [getattr(field.type, "item_type", field.type) for field in fields]
    arms = [arm for one in held for arm in getattr(one, "types", [one])]
    return bool({_cls(arm) for arm in arms} & {_cls(one) for one in others} - {None})


SAMPLES: dict[type[Message], list[Message]] = {
    kind: _values(inspect.type_info(kind), kind.__name__) for kind in KINDS
}
MESSAGES = [sample for samples in SAMPLES.values() for sample in samples]
