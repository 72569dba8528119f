"""The loaded adapters of a worker, and the terms that they add to a step.

The table has a fixed number of rows, which the engine assigns. A row has a generation, which the
engine increases each time it loads an adapter into the row. A slot names row and generation, so a
row that was reused can never serve a request of its former adapter.

`StepAdapters.add` is the reference for the compiled terms (kernels/csrc/low_rank.h).

Legend: T tokens in the step, R rows (requests) of the step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.worker.steps import NO_ADAPTER, SlotInit
from worker.device.staging import upload
from worker.kernels import structs
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.layers.low_rank import LayerAdapters
from worker.lora.adapter import Adapter, AdapterFiles, LowRankTerm
from worker.lora.targets import LINEARS
from worker.slots.table import SlotTable
from worker.spec.kernel_sizes import SIZE_MULTIPLE
from worker.spec.model_spec import AdaptedLinear

Ints = NDArray[np.int64]
FREE = -1
"""Generation of a row without an adapter."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in a row of the table."""

    generation: int
    adapter: Adapter


class AdapterTable:
    """The loaded adapters.

    num_rows   0 in a worker without adapters
    files      reads further adapters; None: there can be none
    """

    def __init__(
        self, num_rows: int = 0, num_layers: int = 0, files: AdapterFiles | None = None
    ) -> None:
        self.num_rows = num_rows
        self.files = files
        self.num_layers = num_layers
        self._rows: dict[int, LoadedAdapter] = {}
        #: [num_rows] generation of each row; FREE: none.
        self._generations = np.full(num_rows, FREE, np.int64)
        #: What the compiled kernels read: the terms of each row, layer and linear.
        self._terms = (structs.CLowRankTerm * (num_rows * num_layers * len(LINEARS)))()
        self._shrunk = torch.empty(0)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Memory of the loaded adapters, in bytes."""
        return sum(each.adapter.num_bytes for each in self._rows.values())

    @property
    def widest(self) -> int:
        """The largest number of rows of `LowRankTerm.down` of all loaded adapters."""
        return max((each.adapter.widest for each in self._rows.values()), default=0)

    def __getitem__(self, row: int) -> Adapter:
        return self._rows[row].adapter

    # ---- load and unload

    def add(self, row: int, generation: int, adapter: Adapter) -> None:
        """Put an adapter into a free row. Raises ValueError if the row does not exist or is not
        free."""
        if not 0 <= row < self.num_rows or row in self._rows:
            raise ValueError(f"row {row} of {self.num_rows} cannot get an adapter")
        self._rows[row] = LoadedAdapter(generation, adapter)
        self._generations[row] = generation
        for (layer, linear), term in adapter.terms.items():
            self._terms[self._index(row, layer, linear)] = _struct(term)

    def remove(self, row: int, generation: int) -> None:
        """Free a row and the memory of its adapter. Raises ValueError if the row does not hold this
        generation."""
        self._check(row, generation)
        del self._rows[row]
        self._generations[row] = FREE
        first = self._index(row, 0, LINEARS[0])
        for index in range(first, first + self.num_layers * len(LINEARS)):
            self._terms[index] = structs.CLowRankTerm()

    def check(self, init: SlotInit) -> None:
        """Raise ValueError if a slot is bound with an adapter that is not loaded."""
        if init.adapter != NO_ADAPTER:
            self._check(init.adapter, init.adapter_generation)

    def _check(self, row: int, generation: int) -> None:
        found = self._rows.get(row)
        if found is None or found.generation != generation:
            held = "no adapter" if found is None else f"generation {found.generation}"
            raise ValueError(f"adapter row {row} holds {held}, not generation {generation}")

    def _index(self, row: int, layer: int, linear: AdaptedLinear) -> int:
        return (row * self.num_layers + layer) * len(LINEARS) + LINEARS.index(linear)

    # ---- steps

    def for_rows(self, slots: SlotTable, row_slots: Ints, counts: Ints) -> StepAdapters | None:
        """Return the adapters of a step's rows; None if no row has one.

        row_slots   [R] slot of each row
        counts      [R] number of tokens of each row

        Raises ValueError for a slot that does not exist, or that names a row which does not hold
        the slot's generation.
        """
        if not self.num_rows:
            return None
        if row_slots.min() < 0 or row_slots.max() >= slots.max_slots:
            raise ValueError(f"a row's slot is outside the {slots.max_slots} slots")
        of_rows = slots.host("adapter").numpy()[row_slots].astype(np.int64)
        if (of_rows == NO_ADAPTER).all():
            return None
        used = of_rows != NO_ADAPTER
        wanted = slots.host("adapter_generation").numpy()[row_slots][used]
        rows = of_rows[used]
        if rows.min() < 0 or rows.max() >= self.num_rows:
            raise ValueError(f"a slot names an adapter row outside the {self.num_rows} rows")
        if (self._generations[rows] != wanted).any():
            raise ValueError("a slot names an adapter that is not loaded any more")
        return StepAdapters(self, np.repeat(of_rows, counts), slots.device)

    def struct(self, of_tokens: Ints) -> structs.CStepAdapters:
        """Return the struct that describes the adapters of a step to the kernels.

        of_tokens   [T] adapter row of each token. It must live until the step is computed, and so
                    must this object
        """
        width = self.widest
        if len(self._shrunk) < len(of_tokens) * width:
            self._shrunk = torch.empty(len(of_tokens) * width)
        terms, rows = ctypes.addressof(self._terms), of_tokens.ctypes.data
        return structs.CStepAdapters(terms, rows, self._shrunk.data_ptr(), width)


class StepAdapters:
    """The adapters of one step's tokens.

    of_tokens   [T] row of each token in the table; NO_ADAPTER: none
    """

    def __init__(self, table: AdapterTable, of_tokens: Ints, device: torch.device) -> None:
        self._table = table
        self.of_tokens = of_tokens
        self._device = device

    @cached_property
    def struct(self) -> structs.CStepAdapters:
        """What the compiled kernels read. It points at this object and at the table."""
        return self._table.struct(self.of_tokens)

    def for_layer(self, layer: int, kernels: Kernels) -> LayerAdapters:
        if isinstance(kernels, NativeKernels):
            return partial(self._add_compiled, kernels, layer)
        return partial(self.add, layer)

    def add(self, layer: int, linear: AdaptedLinear, x: Tensor, y: Tensor) -> None:
        """Add the terms of all tokens to the result of a linear.

        x   [T, inputs]
        y   [T, outputs], changed in place
        """
        for adapter, tokens in self._groups:
            term = adapter.terms.get((layer, linear))
            if term is None:
                continue
            shrunk = x.index_select(0, tokens) @ term.down.t()
            for part in term.parts:
                some = shrunk[:, part.start : part.start + part.rank] @ part.up
                outputs = y[:, part.first : part.first + part.outputs]
                outputs.index_add_(0, tokens, some, alpha=part.scale)

    def _add_compiled(
        self, kernels: NativeKernels, layer: int, linear: AdaptedLinear, x: Tensor, y: Tensor
    ) -> None:
        """Do what `add` does, with the compiled kernels if they support the linear."""
        if x.shape[1] % SIZE_MULTIPLE:
            return self.add(layer, linear, x, y)
        place = (self._table.num_layers, layer, LINEARS.index(linear))
        return kernels.add_low_rank(self.struct, place, x, y)

    @cached_property
    def _groups(self) -> Sequence[tuple[Adapter, Tensor]]:
        """The adapters of the step, each with the indexes of its tokens, on the device."""
        rows = [row for row in np.unique(self.of_tokens).tolist() if row != NO_ADAPTER]
        indexes = upload([np.flatnonzero(self.of_tokens == row) for row in rows], self._device)
        return [(self._table[row], index) for row, index in zip(rows, indexes, strict=True)]


def _struct(term: LowRankTerm) -> structs.CLowRankTerm:
    parts = [
        structs.CLowRankPart(
            up=part.up.data_ptr(),
            start=part.start,
            rank=part.rank,
            first=part.first,
            outputs=part.outputs,
            scale=part.scale,
        )
        for part in term.parts
    ]
    found = structs.CLowRankTerm(
        down=term.down.data_ptr(), rank=term.rank, num_parts=len(term.parts)
    )
    found.parts[: len(parts)] = parts
    return found
