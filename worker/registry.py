"""Finds per-slot tensors that are no fields of the slot table: a walk over all that a worker holds.

A tensor with a dimension of one item a slot, kept from one step to the next, is state of requests.
Outside the table nobody resets it, so what it held for one request is read for the next. The walk
starts at an object and at the worker's own modules and follows attributes, containers, closures,
defaults and caches; only other libraries' modules and classes are left out.

For the number of slots to mean slots alone, no other dimension may be equal to it: `rows_for` finds
such a number.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy as np
from torch import Tensor

from worker.slots.table import SlotTable

ROOM = __name__.partition(".")[0]
LEAST_ROWS = 11
"""Smaller numbers are dimensions of too many things."""

Held = tuple[str, Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]]
"""Who holds it, and what."""


def check_registry(root: object) -> None:
    """Raises RuntimeError, naming them, where tensors that `root` leads to are per slot and in no
    slot table."""
    if found := strays(root):
        raise RuntimeError(f"per-slot tensors outside the slot table: {'; '.join(found)}")


def strays(root: object) -> list[str]:
    """Such tensors, in words. What shares memory with a table's tensor is the table's."""
    things = list(_walk([root, *_own_modules()]))
    tables = [thing for _, thing in things if isinstance(thing, SlotTable)]
    numbers = {table.max_slots for table in tables}
    known = {_memory(tensor) for table in tables for tensor in table.tensors()}
    return [
        f"{tuple(thing.shape)} {thing.dtype} held by {holder}"
        for holder, thing in _tensors(things)
        if numbers & set(thing.shape) and _memory(thing) not in known and 0 not in thing.shape
    ]


def rows_for(max_slots: int, roots: Iterable[object]) -> int:
    """Rows for a slot table of at least max_slots: a number that no tensor that `roots` lead to has
    as a dimension, and prime, as few numbers are that a step would come upon."""
    taken = {size for _, tensor in _tensors(_walk(roots)) for size in tensor.shape}
    rows = max(max_slots, LEAST_ROWS)
    while rows in taken or any(rows % divisor == 0 for divisor in range(2, int(rows**0.5) + 1)):
        rows += 1
    return rows


def _tensors(things: Iterable[tuple[str, object]]) -> Iterator[Held]:
    for holder, thing in things:
        if isinstance(thing, Tensor | np.ndarray):
            yield holder, thing


def _walk(roots: Iterable[object]) -> Iterator[tuple[str, object]]:
    """Every object that the roots lead to, once, and the name of the nearest that has one."""
    seen: set[int] = set()
    queue = [("a root", root) for root in roots]
    kept = []  # so that no id in `seen` becomes another's
    while queue:
        holder, thing = queue.pop()
        if id(thing) in seen or not _is_ours(thing):
            continue
        seen.add(id(thing))
        kept.append(thing)
        yield holder, thing
        name = _name(thing) or holder
        queue += [(name, child) for child in _children(thing)]


def _is_ours(thing: object) -> bool:
    if isinstance(thing, type):
        return thing.__module__.startswith(f"{ROOM}.")
    return not isinstance(
        thing, ModuleType | logging.Logger | BuiltinFunctionType | str | bytes | int | float
    )


def _children(thing: object) -> list[object]:
    if isinstance(thing, Tensor | np.ndarray):
        return []
    if isinstance(thing, FunctionType):  # its globals are its module's, which is a root or foreign
        return [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
    return gc.get_referents(thing)


def _own_modules() -> list[object]:
    loaded = sorted(sys.modules.items())
    return [vars(module) for name, module in loaded if name.startswith(f"{ROOM}.")]


def _name(thing: object) -> str | None:
    """Of what has one that says where to look."""
    kind = thing if isinstance(thing, type | FunctionType) else type(thing)
    if kind.__module__.partition(".")[0] in ("builtins", "collections", "functools"):
        return None
    return f"{kind.__module__}.{kind.__qualname__}"


def _memory(tensor: Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    if isinstance(tensor, np.ndarray):
        while isinstance(tensor.base, np.ndarray):
            tensor = tensor.base
        return int(tensor.ctypes.data)
    return tensor.untyped_storage().data_ptr()
