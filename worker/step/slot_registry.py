"""Checks of `--poison-slots`: poison in free slots, and a search for stray per-slot tensors.

Free rows of the slot table are filled with poison. A value that is read after its request has ended
then gives visibly wrong results.

A tensor is request state if it is kept from step to step and has one item per slot in some
dimension. A request's state outside the slot table is never reset, so a later request could read an
earlier one's values. The search for such tensors starts at given objects and at the worker's own
modules. It follows attributes, containers, closures, defaults and caches, and leaves out modules
and classes of other libraries.

A tensor counts as per-slot if one of its dimensions equals the number of slots. So no other
dimension may equal that number, and `rows_for` chooses one accordingly.

A worker imports this module only with `--poison-slots`, and then uses `PoisonedSlots` and a
`CheckedRunner`.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy as np
import torch
from torch import Tensor

from protocol.worker.steps import StepPlan
from worker.batch.pending_step import PendingStep
from worker.slots.table import SlotField, SlotTable
from worker.step.runner import Runner, no_masks

ROOM = __name__.partition(".")[0]
MIN_ROWS = 11
"""Smallest number of rows. Smaller numbers are dimensions of too many tensors."""

Held = tuple[str, Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]]
"""The name of an object, and a tensor that it holds."""


class Poison(Enum):
    """Values with which free rows are filled. Each is a pair: (for integers, for floats)."""

    ZEROS = (0, 0.0)
    PLAUSIBLE = (1, 7.25)
    WILD = (-1_000_000_007, float("nan"))


class PoisonedSlots(SlotTable):
    """A slot table whose free rows, and checkpoints that were never saved, hold poison."""

    def __init__(
        self,
        fields: Iterable[SlotField],
        max_slots: int,
        device: torch.device,
        num_checkpoints: int = 0,
        *,
        checkpoints: Tensor | None = None,
        poison: Poison = Poison.WILD,
    ) -> None:
        self._poison = poison
        super().__init__(fields, max_slots, device, num_checkpoints, checkpoints=checkpoints)
        for name, kept in self.checkpoints.items():
            kept[1:].fill_(self._poison_of(self.fields[name]))

    def release(self, slot: int, generation: int) -> None:
        super().release(slot, generation)
        for field in self.fields.values():
            self[field.name][slot : slot + 1].fill_(self._poison_of(field))
            if field.host:
                self.host(field.name)[slot : slot + 1].fill_(self._poison_of(field))

    def _unused(self, field: SlotField, rows: Tensor) -> Tensor:
        return rows.fill_(self._poison_of(field))

    def _poison_of(self, field: SlotField) -> int | float:
        integer, floating = self._poison.value
        return floating if field.dtype.is_floating_point else integer


class CheckedRunner(Runner):
    """A runner that calls `check_registry` on itself after 1, 2, 4, 8, ... launched steps."""

    _num_steps = 0

    def launch(self, plan: StepPlan, receive_masks: Callable[[], object] = no_masks) -> PendingStep:
        pending = super().launch(plan, receive_masks)
        self._num_steps += 1
        if self._num_steps.bit_count() == 1:
            check_registry(self)
        return pending


def check_registry(root: object) -> None:
    """Raise RuntimeError if per-slot tensors outside the slot tables are reachable from `root`. The
    message lists them."""
    if found := strays(root):
        raise RuntimeError(f"per-slot tensors outside the slot table: {'; '.join(found)}")


def strays(root: object) -> list[str]:
    """Return descriptions of all stray tensors: per-slot tensors that share no memory with a slot
    table or its state objects, and are reachable from `root` or from the worker's modules."""
    things = list(_walk([root, *_own_modules()]))
    tables = [thing for _, thing in things if isinstance(thing, SlotTable)]
    numbers = {table.max_slots for table in tables}
    known = [_memory(tensor) for table in tables for tensor in table.tensors()]
    known += [_memory(kept) for table in tables for kept in table.checkpoints.values()]
    own = (tensor for table in tables for _, tensor in _tensors(_walk([table.states])))
    known += [_memory(tensor) for tensor in own]
    return [
        f"{tuple(thing.shape)} {thing.dtype} held by {holder}"
        for holder, thing in _tensors(things)
        if numbers & set(thing.shape)
        and 0 not in thing.shape
        and not any(_memory(thing).start in each for each in known)
    ]


def rows_for(max_slots: int, roots: Iterable[object]) -> int:
    """Return a number of rows for a slot table, at least max_slots. The number equals no dimension
    of a tensor that is reachable from `roots`. It is prime, because few tensors of a step have a
    prime dimension."""
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
    """Yield every object that is reachable from the roots, once, with the name of its nearest
    holder that has one."""
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
    if isinstance(thing, FunctionType):  # without its globals, which belong to a module
        return [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
    return gc.get_referents(thing)


def _own_modules() -> list[object]:
    loaded = sorted(sys.modules.items())
    return [vars(module) for name, module in loaded if name.startswith(f"{ROOM}.")]


def _name(thing: object) -> str | None:
    """Return the qualified name of a class or function, or of an instance's class; None for
    builtins, whose names do not help."""
    kind = thing if isinstance(thing, type | FunctionType) else type(thing)
    if kind.__module__.partition(".")[0] in ("builtins", "collections", "functools"):
        return None
    return f"{kind.__module__}.{kind.__qualname__}"


def _memory(tensor: Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> range:
    """Return the addresses of the memory that the tensor is a view of."""
    if isinstance(tensor, np.ndarray):
        while isinstance(tensor.base, np.ndarray):
            tensor = tensor.base
        return range(tensor.ctypes.data, tensor.ctypes.data + tensor.nbytes)
    storage = tensor.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
