"""The slot table: every buffer that the worker keeps between steps and that belongs to one request.

Invariant: a request's state enters only through `bind`, from one list of declared fields, and
`bind` writes every item of the row that can be read later. New requests, resumed requests and
requests whose prompt was computed elsewhere are all bound in the same way. So no value of an
earlier request in the row can reach a later one. No other class may create tensors with one row per
slot.

Writes are staged on the host and applied by `flush`, in order and in one batch. No value is copied
to the device on its own, and the host never waits for the device.

Legend: N slots bound since the last flush.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.engine.attachments import Attachment
from protocol.worker.steps import NO_CHECKPOINT, SlotInit
from worker.device.staging import Words, upload
from worker.device.zeros import lazy_zeros

Value = int | float | Words
Derive = Callable[["SlotTable", Tensor], None]


ALIGNED_ITEMS = 16
"""The buffer of each field starts at a multiple of this many items: 64 bytes, if items have four.
"""


class RestPolicy(Enum):
    """Policy for the part of a row that `init` does not write. Every field must choose one."""

    FILL = auto()
    """The rest is set to `fill`, so the whole row is defined after binding."""
    GUARDED = auto()
    """The rest keeps its old values. Readers stop at a count, which is the FILL field `guard`."""
    DERIVED = auto()
    """The field has no `init`. Its row is computed from other fields after they are written."""
    RESTORED = auto()
    """The field has no `init`. Its row is a copy of the checkpoint that the request starts from, or
    zeros if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotField:
    """Declaration of one per-slot buffer, [slots, *shape]."""

    #: Key of the buffer in the table. Unique.
    name: str
    #: Type of the items on the device.
    dtype: torch.dtype
    #: () for a scalar, (width,) for a row.
    shape: tuple[int, ...] = ()
    #: Policy for the part of a row that `init` does not write.
    rest: RestPolicy
    #: Returns the value of a scalar, or the first items of a row (int64 or float64).
    init: Callable[[SlotInit], Value] | None = None
    #: Value of the rest of the row, if `rest` is FILL.
    fill: int | float = 0
    #: Name of the FILL scalar that counts the row's readable items, if `rest` is GUARDED.
    guard: str | None = None
    #: Computes the rows of newly bound slots, if `rest` is DERIVED.
    derive: Derive | None = None
    #: Methods that may write the field after binding. If empty, it is constant while bound.
    written_by: tuple[str, ...] = ()
    #: Whether to keep a copy in host memory, so that the host can decide what work a step needs.
    #: Only for scalars that are constant while bound.
    host: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) > 1:
            raise ValueError(f"slot field {self.name}: rows have at most one dimension")
        if (self.rest is RestPolicy.GUARDED) != (self.guard is not None):
            raise ValueError(f"slot field {self.name}: GUARDED, and only GUARDED, needs a guard")
        if self.rest is RestPolicy.GUARDED and not self.shape:
            raise ValueError(f"slot field {self.name}: a scalar has no rest to guard")
        if (self.rest is RestPolicy.DERIVED) != (self.derive is not None):
            raise ValueError(f"slot field {self.name}: DERIVED, and only DERIVED, needs a derive")
        has_init = self.rest not in (RestPolicy.DERIVED, RestPolicy.RESTORED)
        if has_init == (self.init is None):
            raise ValueError(
                f"slot field {self.name}: init is for fields that are not DERIVED or RESTORED"
            )
        if self.host and (self.shape or self.written_by or self.init is None):
            raise ValueError(
                f"slot field {self.name}: a host copy must be a scalar that only bind writes"
            )

    @property
    def width(self) -> int:
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """A staged write: item index[i] of the flattened field becomes values[i]. Items of `values`
    have eight bytes."""

    field: SlotField
    index: NDArray[np.int64]
    values: Words

    def without(self, slot: int) -> SlotWrite:
        """Return the write without its items in `slot`."""
        kept = self.index // self.field.width != slot
        return SlotWrite(self.field, self.index[kept], self.values[kept])


class SlotTable:
    """The buffers of all fields, and the request that occupies each row.

    The buffers of all fields of one dtype share memory, so that one operation can write to all of
    them.
    """

    def __init__(
        self,
        fields: Iterable[SlotField],
        max_slots: int,
        device: torch.device,
        num_checkpoints: int = 0,
        *,
        checkpoints: Tensor | None = None,
    ) -> None:
        """Create a table whose rows are all free.

        checkpoints   zeroed memory [1 + num_checkpoints, width] for the checkpoints of the only
                      RESTORED field; None: it is allocated here
        """
        self.fields = {field.name: field for field in fields}
        self.max_slots = max_slots
        self.device = device
        #: Field -> index of its first item in the memory of its dtype.
        self._first: dict[str, int] = {}
        #: Dtype -> the memory of all its fields, flat.
        self._flat = self._allocate(device)
        self._tensors = {f.name: self._rows_of(f) for f in self.fields.values()}
        #: RESTORED field -> [1 + number of checkpoints, width]. Row 0 is NO_CHECKPOINT: zeros.
        self.checkpoints = {
            f.name: lazy_zeros((1 + num_checkpoints, f.width), f.dtype, device)
            if checkpoints is None
            else checkpoints
            for f in self.fields.values()
            if f.rest is RestPolicy.RESTORED
        }
        self._host = {f.name: self._host_copy(f) for f in self.fields.values() if f.host}
        #: Bound slot -> the generation of its binding.
        self._occupants: dict[int, int] = {}
        #: Slot -> the last generation that was bound.
        self._generations: dict[int, int] = {}
        self._binds: dict[int, SlotInit] = {}
        #: Bound slot -> the state object of its request, for a model whose class keeps a cache by
        #: itself (RowModel). A newly bound slot has none.
        self.states: dict[int, object] = {}
        #: Bound slot -> the images of its request, if it has any.
        self.images: dict[int, list[Attachment]] = {}
        self._items: list[SlotWrite] = []
        self._check_guards()

    def __getitem__(self, name: str) -> Tensor:
        """Return the field's device buffer [slots, *shape]. A row is valid once its binding was
        flushed."""
        return self._tensors[name]

    def host(self, name: str) -> Tensor:
        """Return the host copy [slots] of a field that is declared with `host=True`."""
        return self._host[name]

    def tensors(self) -> list[Tensor]:
        """Return every per-slot tensor."""
        return [*self._tensors.values(), *self._host.values()]

    # ---- occupants

    def bind(self, init: SlotInit) -> None:
        """Assign a free slot to a request. The next flush writes the request's state into the row.

        Raises ValueError if the slot does not exist or is occupied, if the generation is not newer
        than the slot's last one, if a value is longer than its row, or if the checkpoint does not
        exist or is missing.
        """
        slot = init.slot
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot {slot} does not exist; there are {self.max_slots}")
        if slot in self._occupants:
            raise ValueError(f"slot {slot} is already bound")
        if init.generation <= self._generations.get(slot, -1):
            raise ValueError(f"slot {slot}: generation {init.generation} is not new")
        self._check_widths(init)
        self._check_checkpoint(init)
        self.states.pop(slot, None)
        self.images.pop(slot, None)
        if init.images:
            self.images[slot] = init.images
        self._occupants[slot] = self._generations[slot] = init.generation
        self._binds[slot] = init

    def release(self, slot: int, generation: int) -> None:
        """Free a slot. Raises ValueError and changes nothing if the slot is not bound with this
        generation."""
        if slot not in self._occupants:
            raise ValueError(f"slot {slot} is free; generation {generation} cannot be released")
        if self._occupants[slot] != generation:
            raise ValueError(
                f"slot {slot} is bound to generation {self._occupants[slot]}; generation "
                f"{generation} cannot be released"
            )
        del self._occupants[slot]
        self.states.pop(slot, None)
        self.images.pop(slot, None)
        self._binds.pop(slot, None)
        self._items = [write.without(slot) for write in self._items]

    # ---- staged writes

    def stage_items(
        self,
        name: str,
        slots: NDArray[np.int64],
        indexes: NDArray[np.int64],
        values: NDArray[np.int64],
    ) -> None:
        """Stage the writes table[name][slots[i], indexes[i]] = values[i]. Each item may be written
        only once before the next flush. Raises ValueError if a slot is not bound, or if an index is
        outside the row."""
        if not len(slots):
            return
        field = self.fields[name]
        free = set(slots.tolist()) - self._occupants.keys()
        if free or indexes.min() < 0 or indexes.max() >= field.width:
            raise ValueError(
                f"writes to {name} of free slots {sorted(free)} or outside its width {field.width}"
            )
        self._items.append(SlotWrite(field, slots * field.width + indexes, values))

    def flush(self) -> None:
        """Apply the staged writes: first the rows of new occupants, then items, then derived
        fields."""
        if not self._binds and not self._items:
            return
        inits = list(self._binds.values())
        writes = self._resets(inits) + self._items
        merged = [self._merged(dtype, writes) for dtype in self._flat]
        columns = [column for pair in merged for column in pair]
        slots, *moved = upload([_column(self._binds), *columns], self.device)
        if inits:
            for field in self.fields.values():
                if field.rest is RestPolicy.FILL and field.shape:
                    self._fill(field, slots)
                elif field.rest is RestPolicy.RESTORED:
                    self._restore(field, inits)
        for items, index, values in zip(self._flat.values(), moved[::2], moved[1::2], strict=True):
            if len(index):
                items.index_copy_(0, index, values.to(items.dtype))
        self._write_host_copies(writes)
        if inits:
            for field in self.fields.values():
                if field.derive is not None:
                    self._derive(field, slots)
        self._binds.clear()
        self._items.clear()

    def append_tokens(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write sampled tokens [S] at positions [S] int64 of distinct slots [S], on the device.
        Each slot's length becomes its position + 1."""
        token_ids, lens = self._tensors["token_ids"], self._tensors["len"]
        index = slots * self.fields["token_ids"].width + positions
        token_ids.view(-1).index_copy_(0, index, tokens.to(token_ids.dtype))
        lens.index_copy_(0, slots, (positions + 1).to(lens.dtype))

    def _resets(self, inits: Sequence[SlotInit]) -> list[SlotWrite]:
        """Return the writes that set the fields of all new occupants."""
        if not inits:
            return []
        return [_reset(field, inits) for field in self.fields.values() if field.init is not None]

    def _fill(self, field: SlotField, slots: Tensor) -> None:
        """Fill whole rows of the new occupants' slots [N]."""
        self[field.name].index_fill_(0, slots, field.fill)

    def _restore(self, field: SlotField, inits: Sequence[SlotInit]) -> None:
        """Copy the checkpoints of the new occupants to their rows."""
        rows, kept = self[field.name], self.checkpoints[field.name]
        for init in inits:
            rows[init.slot].copy_(kept[init.checkpoint])

    def _derive(self, field: SlotField, slots: Tensor) -> None:
        """Compute the rows of `field` for the new occupants' slots [N] from their other fields."""
        assert field.derive is not None
        field.derive(self, slots)

    def _merged(self, dtype: torch.dtype, writes: Sequence[SlotWrite]) -> tuple[Words, Words]:
        """Return the writes to all fields of a dtype as one: indexes into `_flat[dtype]`, each
        only once, and the values. A later write replaces an earlier one."""
        chosen = [write for write in writes if write.field.dtype == dtype]
        if not chosen:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        index = np.concatenate([self._first[w.field.name] + w.index for w in chosen])
        values = np.concatenate([w.values for w in chosen])
        if not self._items or not self._binds:
            return index, values
        index, last = np.unique(index[::-1], return_index=True)
        return index, values[::-1][last]

    def _write_host_copies(self, writes: Sequence[SlotWrite]) -> None:
        """Apply the writes to the host copies, unless these share the buffers' memory."""
        if self.device.type == "cpu":
            return
        for write in writes:
            copy = self._host.get(write.field.name)
            if copy is not None:
                copy[torch.from_numpy(write.index)] = torch.from_numpy(write.values).to(copy.dtype)

    # ---- construction and checks

    def _allocate(self, device: torch.device) -> dict[torch.dtype, Tensor]:
        """Return the memory of all fields by dtype, and set the fields' places in it."""
        sizes: dict[torch.dtype, int] = {}
        for field in self.fields.values():
            if field.rest is RestPolicy.RESTORED:
                continue  # large, and never written by items
            self._first[field.name] = first = sizes.get(field.dtype, 0)
            num_items = self.max_slots * field.width
            sizes[field.dtype] = first + -(-num_items // ALIGNED_ITEMS) * ALIGNED_ITEMS
        return {
            dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()
        }

    def _rows_of(self, field: SlotField) -> Tensor:
        """Return the field's buffer [slots, *shape]: in the memory of its dtype, or its own."""
        if field.rest is RestPolicy.RESTORED:
            return self._unused(
                field, lazy_zeros((self.max_slots, *field.shape), field.dtype, self.device)
            )
        first, num_items = self._first[field.name], self.max_slots * field.width
        items = self._flat[field.dtype][first : first + num_items]
        return self._unused(field, items.view(self.max_slots, *field.shape))

    def _host_copy(self, field: SlotField) -> Tensor:
        tensor = self._tensors[field.name]
        if tensor.device.type == "cpu":
            return tensor
        return self._unused(field, torch.zeros(self.max_slots, dtype=field.dtype))

    def _unused(self, field: SlotField, rows: Tensor) -> Tensor:
        """Return new rows of a field, all of them free."""
        return rows

    def _check_guards(self) -> None:
        for field in self.fields.values():
            guard = self.fields.get(field.guard) if field.guard else None
            if field.guard and (guard is None or guard.shape or guard.rest is not RestPolicy.FILL):
                raise ValueError(
                    f"slot field {field.name}: guard must be a FILL scalar of the table"
                )

    def _check_checkpoint(self, init: SlotInit) -> None:
        for name, kept in self.checkpoints.items():
            if not 0 <= init.checkpoint < len(kept):
                raise ValueError(f"checkpoint {init.checkpoint} does not exist")
            if (init.checkpoint == NO_CHECKPOINT) != (init.num_computed == 0):
                raise ValueError(
                    f"slot {init.slot}: the {name} after {init.num_computed} positions cannot be "
                    f"that of checkpoint {init.checkpoint}"
                )

    def _check_widths(self, init: SlotInit) -> None:
        for field in self.fields.values():
            if field.shape and field.init is not None:
                size = np.size(field.init(init))
                if size > field.width:
                    raise ValueError(
                        f"{size} items do not fit into {field.name}, which holds {field.width}"
                    )


def _column(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def _reset(field: SlotField, inits: Sequence[SlotInit]) -> SlotWrite:
    """Return the write that sets the field's scalar or row prefix for each of `inits`."""
    assert field.init is not None
    prefixes = [np.atleast_1d(np.asarray(field.init(init))) for init in inits]
    starts = np.array([init.slot * field.width for init in inits])
    return SlotWrite(field, _ragged(starts, prefixes), _words(field, np.concatenate(prefixes)))


def _words(field: SlotField, values: Words) -> Words:
    if field.dtype.is_floating_point:
        return values.astype(np.float64)
    return values.astype(np.int64)


def _ragged(starts: NDArray[np.int64], prefixes: Sequence[Words]) -> NDArray[np.int64]:
    """Return the index of every item of the prefixes: starts[i], starts[i] + 1, ... for
    prefixes[i]."""
    lens = np.array([prefix.size for prefix in prefixes])
    before = np.cumsum(lens) - lens
    index: NDArray[np.int64] = np.repeat(starts - before, lens) + np.arange(lens.sum())
    return index
