"""Searches a worker for per-slot tensors that are not fields of the slot table.

A tensor with one item per slot in some dimension that is kept from step to step is request state.
Outside the table it is never reset, so a later request could read an earlier one's values. The
search starts at given objects and at the worker's own modules, and follows attributes, containers,
closures, defaults and caches. Modules and classes of other libraries are left out.

A tensor counts as per-slot if one of its dimensions equals the number of slots, so no other
dimension may equal it: `rows_for` chooses such a number. Only `--poison-slots` uses this module.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy as np
from torch import Tensor

from worker.slots.table import SlotTable

ROOM = __name__.partition(".")[0]
MIN_ROWS = 11
"""Smaller numbers are dimensions of too many tensors."""

Held = tuple[str, Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]]
"""A holder's name, and a tensor that it holds."""


def periodic_check(root: object) -> Callable[[int], None]:
    """Return a function of the number of steps done that runs `check_registry` after steps 1, 2, 4,
    8, ..."""

    def check(num_steps: int) -> None:
        if num_steps.bit_count() == 1:
            check_registry(root)

    return check


def check_registry(root: object) -> None:
    """Raise RuntimeError with a list of the per-slot tensors that are reachable from `root` and not
    in a slot table."""
    if found := strays(root):
        raise RuntimeError(f"per-slot tensors outside the slot table: {'; '.join(found)}")


def strays(root: object) -> list[str]:
    """Describe these tensors. A tensor that shares memory with a table's tensor is not listed."""
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
    """Return a row count of at least max_slots for a slot table. It equals no dimension of a tensor
    reachable from `roots`, and is prime, because few tensors of a step have a prime dimension."""
    taken = {size for _, tensor in _tensors(_walk(roots)) for size in tensor.shape}
    rows = max(max_slots, MIN_ROWS)
    while rows in taken or any(rows % divisor == 0 for divisor in range(2, int(rows**0.5) + 1)):
        rows += 1
    return rows


def _tensors(things: Iterable[tuple[str, object]]) -> Iterator[Held]:
    for holder, thing in things:
        if isinstance(thing, Tensor | np.ndarray):
            yield holder, thing


def _walk(roots: Iterable[object]) -> Iterator[tuple[str, object]]:
    """Yield every object reachable from the roots once, with the nearest holder that has a name."""
    seen: set[int] = set()
    queue = [("a root", root) for root in roots]
    visited = []  # keeps the objects alive, so that no id in `seen` is reused
    while queue:
        holder, thing = queue.pop()
        if id(thing) in seen or not _is_ours(thing):
            continue
        seen.add(id(thing))
        visited.append(thing)
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
    if isinstance(thing, FunctionType):  # its globals are a module's, which is a root or foreign
        return [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
    return gc.get_referents(thing)


def _own_modules() -> list[object]:
    loaded = sorted(sys.modules.items())
    return [vars(module) for name, module in loaded if name.startswith(f"{ROOM}.")]


def _name(thing: object) -> str | None:
    """Return the qualified name of a class, function or instance, if it helps to find it."""
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
