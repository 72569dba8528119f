"""Triton kernels on a machine without a GPU: run by Triton's interpreter, or compiled for a GPU.

Triton decides when it decorates a function whether launches interpret or compile it, and decorates
its own library (`tl.max`, `tl.cdiv`, ...) when it is first imported. So `interpreted` returns a
second copy of a module. Its kernels are interpreted, together with what they call. The first copy
can still be compiled. `compile_for` compiles a kernel with the compilers in Triton's package, and
returns what the machine code needs and contains. `recorded_calls` collects the arguments with which
the host launches kernels, to compile exactly what a GPU would run.

Three rules for kernels and their tests:

- The interpreter multiplies the bits of bfloat16 numbers instead of the numbers in `tl.dot`, so
  tests that interpret such kernels use float32 or float16. The interpreter of Triton 3.6 does not
  work with NumPy 2.4.
- A module imports Triton's language as `import triton.language as tl`, because the interpreter
  replaces the functions of this module if it finds it among a kernel's globals.
- A launch passes `enable_fp_fusion=True`. Without it Triton warns, because the default will change.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.pretended_device import PretendedDevice
from tests.support.triton_device import chosen_device, moving

triton = pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.cache import get_cache_manager  # noqa: E402
from triton.runtime.jit import JITFunction, mangle_type  # noqa: E402

CAPABILITIES = (80, 90, 100)
"""Compute capabilities that kernels are compiled for: A100, H100 and B200."""
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Compute capability -> most shared memory of one block of threads."""

NUM_WARPS, NUM_STAGES = 4, 3
"""Triton's defaults."""

PATCHED = (tl, tl.core, tl.math, tl.tensor, tl.block_type, tl.dtype, tl.condition)
"""Modules and classes whose attributes the interpreter replaces. It restores only those that the
launched kernel uses by itself, and not those that its callees use."""
OWN = ("worker.kernels.triton", "worker.sampling.triton")
"""Packages whose modules `interpreted` loads again, with the module that is asked for."""


# ---- Interpretation.
NUMPY_TYPE = "_get_np_dtype"
"""The interpreter's function that returns NumPy's type of a scalar, or of the scalars of a block.
It makes a table of all types in each call, which took an eighth of the time of a kernel."""
find_numpy_type = vars(interpreter)[NUMPY_TYPE]
numpy_type_of_scalar = cache(find_numpy_type)


def numpy_type(kind: tl.dtype) -> Any:
    scalar = kind.scalar
    return find_numpy_type(scalar) if scalar.is_ptr() else numpy_type_of_scalar(scalar)


vars(interpreter)[NUMPY_TYPE] = numpy_type

# The interpreter computes whether each sum and product of integers overflows, and then ignores the
# result, because it asserts only in its debug mode. This took a sixth of the time of a kernel.
assert not interpreter.interpreter_builder.options.debug
interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)


@cache
def _constant_shape(shape: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    """Return a shape and its number of elements as tensors have them."""
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def init_tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
    """Initialize a tensor as Triton does, but with a shape that all tensors of this shape share."""
    shape = tuple(type.shape) if type.is_block() else ()
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constant_shape(shape)


init_block_type = tl.block_type.__init__
_BLOCK_TYPES: dict[tuple[object, ...], dict[str, object]] = {}


def init_shared_block_type(
    self: tl.block_type, element_ty: tl.dtype, shape: Sequence[int | tl.constexpr]
) -> None:
    """Initialize a type of blocks with the attributes of the first type with these elements and
    this shape. To check a shape and to describe the type takes longer than to find it."""
    space = element_ty.address_space if element_ty.is_ptr() else None
    sizes = (each.value if isinstance(each, tl.constexpr) else each for each in shape)
    key = (element_ty.name, space, *sizes)
    if key not in _BLOCK_TYPES:
        init_block_type(self, element_ty, shape)
        _BLOCK_TYPES[key] = dict(vars(self))
    vars(self).update(_BLOCK_TYPES[key])


broadcast = interpreter.interpreter_semantic.broadcast_impl_value


def broadcast_unlike(lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Broadcast two values as Triton does, which compares shapes slowly even if they are equal."""
    if lhs.type.is_block() and rhs.type.is_block():
        if lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
    elif not rhs.type.is_block() and not lhs.type.is_block():
        return lhs, rhs
    pair: tuple[tl.tensor, tl.tensor] = broadcast(lhs, rhs)
    return pair


interpreter.interpreter_semantic.broadcast_impl_value = broadcast_unlike

BUILTINS = {
    place: [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]
    for place in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
}
"""Module or class -> the functions that each launch replaces. The interpreter searches for them in
each launch."""


patch_attribute = vars(interpreter)["_patch_attr"]


def patch_builtins(place: Any, builder: object, scope: Any) -> None:
    for name in BUILTINS[place]:
        if tl.core.is_builtin(member := getattr(place, name)):  # it is not replaced already
            patch_attribute(place, name, member, builder, scope)


vars(interpreter)["_patch_builtin"] = patch_builtins


@cache
def interpreted(module_name: str) -> ModuleType:
    """Return a copy of a module whose kernels are interpreted, so that they accept tensors on the
    CPU, or on a pretended device. What it imports from the packages in OWN is interpreted as well.

    The environment can name a device that runs the kernels instead (triton_device.py)."""
    device = chosen_device()
    if device is not None and device.type != "cpu":
        return _compiled(module_name, device)

    def concerned() -> set[str]:
        return {name for name in sys.modules if _is_own(name) or name == module_name}

    others = {name: sys.modules.pop(name) for name in concerned()}
    try:
        with knobs.runtime.scope():
            knobs.runtime.interpret = True
            module = importlib.import_module(module_name)
        for name in concerned():
            _isolate_launches(sys.modules[name])
    finally:
        for name in concerned():
            del sys.modules[name]
            _bind(name, None)
        for name, other in others.items():
            sys.modules[name] = other
            _bind(name, other)
    return module


def _compiled(module_name: str, device: torch.device) -> ModuleType:
    """Return a module whose kernels are compiled for a device, and accept tensors on the CPU."""
    module = importlib.import_module(module_name)
    for name in [name for name in sys.modules if _is_own(name) or name == module_name]:
        for kernel in vars(sys.modules[name]).values():
            if isinstance(kernel, JITFunction) and "run" not in vars(kernel):
                vars(kernel)["run"] = moving(_recorded(kernel), device)
    return module


def _recorded(kernel: Any) -> Any:
    run = kernel.run

    def recorded_run(*args: Any, **kwargs: Any) -> None:
        _record(kernel.__name__)
        run(*args, **kwargs)

    return recorded_run


def _is_own(name: str) -> bool:
    return name.startswith(tuple(f"{package}." for package in OWN)) or name in OWN


def _bind(name: str, module: ModuleType | None) -> None:
    """Set the attribute of a package that holds its submodule `name`; remove it if None."""
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        vars(sys.modules[parent]).pop(child, None)
        if module is not None:
            setattr(sys.modules[parent], child, module)


def _isolate_launches(module: ModuleType) -> None:
    """Make a launch of each kernel of `module` leave no trace in Triton's own modules."""
    for kernel in vars(module).values():
        if isinstance(kernel, interpreter.InterpretedFunction):
            kernel.run = _isolated(kernel)


def _isolated(kernel: Any) -> Any:
    run = interpreter.InterpretedFunction.run.__get__(kernel)

    def interpret(*args: Any, **kwargs: Any) -> None:
        with _interpretation():
            run(*args, **kwargs)

    def isolated_run(*args: Any, **kwargs: Any) -> None:
        _record(kernel.__name__)
        if (device := PretendedDevice.active) is None:
            interpret(*args, **kwargs)
        else:
            device.launch(kernel.__name__, interpret, args, kwargs)

    rehearsed = chosen_device()
    return isolated_run if rehearsed is None else moving(isolated_run, rehearsed)


@contextmanager
def _interpretation() -> Iterator[None]:
    """Interpret Triton's own library as well, and restore everything afterwards. The functions that
    the library and the kernel's callees call are replaced here once, not again at each call, which
    would take most of the time."""
    saved = [(place, dict(vars(place))) for place in PATCHED]
    call, interpreted_call = JITFunction.__call__, interpreter.InterpretedFunction.__call__
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        JITFunction.__call__ = lambda self, *args, **kwargs: _callee(self.fn)(*args, **kwargs)
        try:
            interpreter.InterpretedFunction(tl.cdiv.fn)(1, 1)  # replaces the functions of tl.core
            interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(
                *args, **kwargs
            )
            tl.tensor.__init__ = init_tensor
            tl.block_type.__init__ = init_shared_block_type
            yield
        finally:
            JITFunction.__call__ = call
            interpreter.InterpretedFunction.__call__ = interpreted_call
            for place, attributes in saved:
                _restore(place, attributes)


@cache
def _callee(function: Callable[..., Any]) -> Callable[..., Any]:
    return interpreter.InterpretedFunction(function).rewrite()


def _restore(place: Any, attributes: Mapping[str, object]) -> None:
    for name in vars(place).keys() - attributes.keys():
        delattr(place, name)
    for name, value in attributes.items():
        if vars(place)[name] is not value:
            setattr(place, name, value)


_RECORDS: list[list[str]] = []


def _record(kernel: str) -> None:
    for names in _RECORDS:
        names.append(kernel)


@contextmanager
def recorded_launches() -> Iterator[list[str]]:
    """Return a list that receives the name of each interpreted kernel when it is launched."""
    names: list[str] = []
    _RECORDS.append(names)
    try:
        yield names
    finally:
        _RECORDS.pop()


# ---- Compilation.
@dataclass(frozen=True)
class KernelLaunch:
    """A launch of a kernel, with the names of all arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]

    def specialised(self) -> tuple[dict[str, str], dict[str, object], list[str]]:
        """Return the arguments `signature`, `constants` and `aligned` of `compile_for`. Launches
        for which they differ are compiled separately."""
        signature: dict[str, str] = {}
        constants: dict[str, object] = {}
        aligned: list[str] = []
        for parameter in self.kernel.params:
            name, value = parameter.name, self.arguments[parameter.name]
            is_special = type(value) is int and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (is_special and value == 1):
                constants[name] = value
                continue
            signature[name] = mangle_type(value)
            if signature[name][0] == "*":
                is_aligned = (
                    not parameter.do_not_specialize_on_alignment and value.data_ptr() % 16 == 0
                )
            else:
                is_aligned = is_special and value % 16 == 0
            if is_aligned:
                aligned.append(name)
        return signature, constants, aligned

    def compile_for(self, capability: int) -> KernelResources:
        """Compile the kernel as a GPU of this capability would for this launch."""
        signature, constants, aligned = self.specialised()
        return compile_for(
            self.kernel,
            signature,
            constants,
            capability,
            aligned=aligned,
            num_warps=self.arguments.get("num_warps", NUM_WARPS),
            num_stages=self.arguments.get("num_stages", NUM_STAGES),
            fuses=self.arguments.get("enable_fp_fusion", True),
        )


@contextmanager
def recorded_calls(module: ModuleType) -> Iterator[list[KernelLaunch]]:
    """Return a list that receives the launches of a module's kernels, which do not run."""
    calls: list[KernelLaunch] = []

    def recorder(kernel: Any) -> Any:
        def run(*args: Any, grid: tuple[int, ...], warmup: bool, **arguments: Any) -> None:
            named = dict(zip(kernel.arg_names, args, strict=False))
            calls.append(KernelLaunch(kernel, grid, named | arguments))

        return run

    kernels = [each for each in vars(module).values() if isinstance(each, JITFunction)]
    originals = [kernel.run for kernel in kernels]
    for kernel in kernels:
        kernel.run = recorder(kernel)
    try:
        yield calls
    finally:
        for kernel, run in zip(kernels, originals, strict=True):
            kernel.run = run


@dataclass(frozen=True, slots=True)
class KernelResources:
    """The resources that the machine code of a kernel needs, and the kinds of its instructions."""

    #: Registers of a thread.
    registers: int
    #: Bytes of a thread in slow memory, for arrays and for registers that were spilled.
    stack_bytes: int
    #: Instructions that store registers to this memory, and that load them from it.
    spill_stores: int
    spill_loads: int
    #: Shared memory of a block of threads.
    shared_bytes: int
    #: Bytes per thread -> number of instructions that load this many from global memory.
    loads: Mapping[int, int]
    #: The same for stores.
    stores: Mapping[int, int]
    uses_tensor_cores: bool

    @property
    def widest_load_bytes(self) -> int:
        return max(self.loads, default=0)

    @property
    def narrowest_load_bytes(self) -> int:
        return min(self.loads, default=0)


def compile_for(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    capability: int,
    *,
    aligned: Collection[str] = (),
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
    fuses: bool = True,
) -> KernelResources:
    """Compile a kernel, as Triton does at a launch, and return what the machine code needs.

    signature    type of each argument that is not a constant, such as "*bf16", "i32" or "fp32"
    constants    value of each `tl.constexpr` argument, and of each argument that is 1 or None,
                 which Triton treats in the same way
    capability   one of CAPABILITIES
    aligned      integers and pointers that are multiples of 16
    fuses        whether a product and a sum may become one instruction
    """
    names = list(kernel.arg_names)
    source = ASTSource(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fuses}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    columns = getattr(compiled.metadata, "tmem_size", 0) or 0
    assert columns <= 512, f"{columns} columns of tensor memory: a launch would fail"
    return _resources(compiled.asm["cubin"], compiled.metadata.shared)


def _resources(cubin: bytes, shared_bytes: int) -> KernelResources:
    code = _disassembled(cubin)
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]*)", code)
    kinds = Counter(opcode.split(".")[0] for opcode in opcodes)
    return KernelResources(
        registers=_figure(code, "REG"),
        stack_bytes=_figure(code, "STACK"),
        spill_stores=kinds["STL"],
        spill_loads=kinds["LDL"],
        shared_bytes=shared_bytes,
        loads=_widths(opcodes, "LDG", "LDGSTS"),
        stores=_widths(opcodes, "STG"),
        uses_tensor_cores=any("MMA" in kind for kind in kinds),
    )


def _disassembled(cubin: bytes) -> str:
    """Return what cuobjdump prints about a kernel. It takes longer than most tests, so Triton's
    cache keeps the text beside the compiled kernels."""
    key = hashlib.sha256(f"{triton.__version__}, disassembled".encode() + cubin).hexdigest()
    cache, name = get_cache_manager(key), "kernel.txt"
    if (stored := cache.get_file(name)) is not None:
        return Path(stored).read_text()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    cache.put(text, name, binary=False)
    return text


def _figure(usage: str, name: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", usage)
    assert found, f"cuobjdump prints no {name}: {usage}"
    return int(found[1])


def _widths(opcodes: Collection[str], *kinds: str) -> dict[int, int]:
    """Return how many instructions of these kinds move how many bytes per thread."""
    widths: Counter[int] = Counter()
    for kind, *modifiers in (opcode.split(".") for opcode in opcodes):
        if kind in kinds:
            bits = [int(found[1]) for each in modifiers if (found := BITS.fullmatch(each))]
            widths[bits[0] // 8 if bits else 4] += 1
    return dict(sorted(widths.items()))


BITS = re.compile(r"[US]?(8|16|64|128|256)")
"""The modifier of an instruction that moves another number of bits than 32."""
