"""Finds the quantised layers of safetensors files, and the tensors that each layer consists of.

Needs no numpy. Shapes and types are checked here, so that a damaged file is refused before a server
starts. A layer is quantised if the files hold its quantised tensors, so the config's list of layers
that are not quantised is not needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from worker.checkpoint.safetensors_files import DTYPE_BYTES, SafetensorsFiles
from worker.errors import UnusableModel
from worker.spec.quantization import (
    FP8,
    INT4,
    INT4_REORDERED,
    INT8,
    Layout,
    Quantization,
    QuantScheme,
)
from worker.spec.tensors import ModelTensors

Shape = tuple[int, ...]
BLOCK_WEIGHTS = 32
WEIGHT = ".weight"
PLAIN_CODES = {True: "F8_E4M3", False: "I8"}
"""Whether the numbers are floats -> their type in the layout "plain"."""
SCALE_TYPES = ("F16", "BF16", "F32", "F8_E8M0")
CODES: dict[Layout, str] = {
    "gptq": "qweight",
    "awq": "qweight",
    "packed": "weight_packed",
    "plain": "weight",
}
ZEROS: dict[Layout, str] = {"gptq": "qzeros", "awq": "qzeros"}
ORDER: dict[Layout, str] = {"gptq": "g_idx", "packed": "weight_g_idx"}
"""CODES, ZEROS and ORDER: layout -> end of the name of the tensor with the stored numbers, with the
zero points (otherwise "weight_zero_point"), or with the group of each column. Not all files have
the groups."""


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A quantised matrix [rows, columns], and the names of the tensors that it consists of."""

    scheme: QuantScheme
    rows: int
    columns: int
    codes: str
    scales: str
    zeros: str | None
    #: Tensor with the group of each column; None if each group is a run of columns.
    order: str | None

    @property
    def names(self) -> list[str]:
        """Return the names of the tensors that are read."""
        return [name for name in (self.codes, self.scales, self.zeros, self.order) if name]

    @property
    def group(self) -> int:
        """Return the number of columns that share a scale."""
        return self.scheme.block[1] or self.columns

    @property
    def is_aligned(self) -> bool:
        """Return whether the 32 columns of each quantised block share a scale."""
        fits = self.group % BLOCK_WEIGHTS == 0 or self.group >= self.columns
        return self.order is None and fits

    @property
    def kind(self) -> str:
        """Return the number type: a key of `quantization.PACKED_AS`."""
        if self.scheme.is_float:
            return FP8
        if self.scheme.bits == 8 or self.scheme.layout == "plain":
            return INT8
        return INT4 if self.is_aligned else INT4_REORDERED


class QuantizedFiles:
    """Finds the quantised layers of a checkpoint. `shapes` and `kinds` also return the tensors that
    are not quantised.

    The constructor raises UnusableModel if a layer's tensors do not fit the config.
    """

    def __init__(
        self, quantization: Quantization, tensors: ModelTensors, files: SafetensorsFiles
    ) -> None:
        self.quantization = quantization
        self._files = files
        #: Name of a weight -> the layer.
        self.layers: dict[str, QuantizedLayer] = {}
        #: Names of tensors that belong to quantised layers, or that are not needed.
        self._used: set[str] = set()
        biases = {name for name, _ in tensors.tensors() if name.endswith(".bias")}
        for name, shape in tensors.tensors():
            if name.endswith(WEIGHT) and len(shape) == 2 and name not in self.layers:
                self._add(name, shape, biases)

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each weight by name. A quantised layer has the name and the shape
        that it would have if it was not quantised."""
        plain = {n: t.shape for n, t in self._files.tensors.items() if n not in self._used}
        return plain | {name: (layer.rows, layer.columns) for name, layer in self.layers.items()}

    def kinds(self) -> dict[str, str]:
        """Return the number type of each weight by name: its dtype in the file, or
        `QuantizedLayer.kind`."""
        plain = {n: t.dtype for n, t in self._files.tensors.items() if n not in self._used}
        return plain | {name: layer.kind for name, layer in self.layers.items()}

    def _add(self, name: str, shape: Shape, biases: set[str]) -> None:
        module = name.removesuffix(WEIGHT)
        plain = self._files.tensors.get(name)
        schemes = [each for each in self.quantization.schemes if self._has_codes(module, each)]
        errors = []
        for scheme in schemes:
            try:
                layer = self._layer(module, shape, scheme)
            except UnusableModel as error:
                errors.append(error)
                continue
            if plain is not None and layer.codes != name:
                raise UnusableModel(f"the files have both {name} and {layer.codes}")
            self.layers[name] = layer
            self._used.update(layer.names)
            self._used.update(f"{module}.{end}" for end in (*scheme.unused, *ORDER.values()))
            bias = f"{module}.bias"
            if bias in self._files.tensors and bias not in biases and self._is_zero(bias):
                self._used.add(bias)  # some programs store one for layers that have none
            return
        if errors:
            raise errors[0]

    def _has_codes(self, module: str, scheme: QuantScheme) -> bool:
        stored = self._files.tensors.get(f"{module}.{CODES[scheme.layout]}")
        return stored is not None and (scheme.layout != "plain" or stored.dtype not in DTYPE_BYTES)

    def _layer(self, module: str, shape: Shape, scheme: QuantScheme) -> QuantizedLayer:
        layout, (rows, columns) = scheme.layout, shape
        groups = -(-columns // (scheme.block[1] or columns))
        codes = self._checked(
            module, (CODES[layout],), [_codes_shape(scheme, rows, columns)], _codes_types(scheme)
        )
        scales = self._checked(
            module, scheme.scales, _scale_shapes(scheme, rows, groups), SCALE_TYPES
        )
        zeros = order = None
        ends = (ZEROS.get(layout, "weight_zero_point"),)
        if not scheme.has_zeros and f"{module}.{ends[0]}" in self._files.tensors:
            raise UnusableModel(f"{module} has zero points; the config has none")
        if scheme.has_zeros:
            shapes = _zero_shapes(scheme, rows, groups)
            types = ("I8",) if layout == "plain" else ("I32",)
            zeros = self._checked(module, ends, shapes, types)
        if layout in ORDER and (name := f"{module}.{ORDER[layout]}") in self._files.tensors:
            order = self._checked(module, (ORDER[layout],), [(columns,)], ("I32",))
            if self._is_ordered(name, columns, scheme.block[1] or columns):
                order = None
        return QuantizedLayer(scheme, rows, columns, codes, scales, zeros, order)

    def _checked(
        self, module: str, ends: tuple[str, ...], shapes: list[Shape], types: Iterable[str]
    ) -> str:
        """Return the name of the module's tensor that ends in one of `ends`, after checking that it
        exists and has one of the shapes and types."""
        names = [f"{module}.{end}" for end in ends]
        found = next((name for name in names if name in self._files.tensors), None)
        if found is None:
            raise UnusableModel(f"tensor {names[0]!r} is missing from the files")
        stored = self._files.tensors[found]
        if stored.shape not in shapes:
            raise UnusableModel(
                f"{found} has shape {stored.shape}; the config requires {shapes[0]}"
            )
        if stored.dtype not in types:
            raise UnusableModel(f"{found} has dtype {stored.dtype}; supported: {', '.join(types)}")
        return found

    def _is_zero(self, name: str) -> bool:
        return not any(self._files.content(name))

    def _is_ordered(self, name: str, columns: int, group: int) -> bool:
        expected = array("i", (column // group for column in range(columns)))
        return self._files.content(name) == expected.tobytes()


def _words(count: int, bits: int) -> int:
    """Return how many int32 hold `count` integers of `bits` bits."""
    return -(-count * bits // 32)


def _codes_shape(scheme: QuantScheme, rows: int, columns: int) -> Shape:
    match scheme.layout:
        case "gptq":
            return _words(columns, scheme.bits), rows
        case "awq":
            return columns, _words(rows, scheme.bits)
        case "packed":
            return rows, _words(columns, scheme.bits)
        case "plain":
            return rows, columns


def _codes_types(scheme: QuantScheme) -> tuple[str, ...]:
    return (PLAIN_CODES[scheme.is_float],) if scheme.layout == "plain" else ("I32",)


def _scale_shapes(scheme: QuantScheme, rows: int, groups: int) -> list[Shape]:
    """Return the shapes that the scales may have."""
    if scheme.layout in ("gptq", "awq"):
        return [(groups, rows)]
    if scheme.block == (0, 0):
        return [(1,), (), (1, 1)]
    if scheme.block == (1, 0):
        return [(rows, 1), (rows,)]
    return [(-(-rows // scheme.block[0]), groups)]


def _zero_shapes(scheme: QuantScheme, rows: int, groups: int) -> list[Shape]:
    """Return the shapes that the zero points may have."""
    if scheme.layout in ("gptq", "awq"):
        return [(groups, _words(rows, scheme.bits))]
    if scheme.layout == "packed":
        return [(_words(rows, scheme.bits), groups)]
    return _scale_shapes(scheme, rows, groups)
