"""Finds and loads the compiled kernels that this processor can run.

A library is loaded only if the processor has all features that it was compiled for, and used only
if it was compiled from this version of the code. The library uses the OpenMP runtime that torch has
loaded, because a second runtime would start threads of its own, which compete for the cores.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from protocol.config.worker import KernelSet
from protocol.process.installation import reinstall_command
from worker.kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet

log = logging.getLogger(__name__)

VERSION = 33
"""Version of the signatures and structs, and of measured times (fastest.py): it also grows when the
kernels' speeds change. Must equal `kernels_version` in csrc/kernels.cpp."""
FOLDER = Path(__file__).parent
ENTRY_POINT = "GOMP_parallel"
"""Entry point of GNU's OpenMP runtime. The runtimes of LLVM and Intel have it too."""


class NoKernels(Exception):
    """No compiled library can be used. The message gives the reason."""


def runnable(cpu_flags: frozenset[str]) -> list[InstructionSet]:
    """Return the instruction sets that a processor with these flags can run, best first."""
    return [each for each in INSTRUCTION_SETS if each.needs <= cpu_flags]


def selected(wanted: KernelSet, cpu_flags: frozenset[str]) -> list[InstructionSet]:
    """Return the sets that the option `wanted` allows on a processor with these flags, best first;
    [] for torch's kernels."""
    return [each for each in runnable(cpu_flags) if wanted in ("auto", each.name)]


def load(sets: Iterable[InstructionSet]) -> tuple[str, ctypes.CDLL, Path]:
    """Load the library of the first set that is compiled. Return the set's name, the library and
    its file.

    Raises NoKernels if no set is compiled, or if this library was compiled from another version of
    the code.
    """
    names = [each.name for each in sets]
    for name in names:
        path = _path(name)
        if path is None:
            continue
        library = ctypes.CDLL(str(path))
        library.kernels_version.restype = ctypes.c_int64
        if library.kernels_version() != VERSION:
            raise NoKernels(f"{path} was compiled from another version; try: {reinstall_command()}")
        library.set_runtime(_runtime())
        if name != names[0]:
            log.warning(
                "using kernels for %s, because none are compiled for %s, which this processor can "
                "run; with a compiler that supports it, try: %s",
                name,
                names[0],
                reinstall_command(),
            )
        return name, library, path
    raise NoKernels(
        f"no kernels are compiled for {' or '.join(names)}; reinstall with a C++ compiler"
    )


def first_compiled(sets: Iterable[InstructionSet]) -> str | None:
    """Return the name of the first set that a library is compiled for; None if there is none."""
    return next((each.name for each in sets if _path(each.name) is not None), None)


def _path(name: str) -> Path | None:
    for suffix in EXTENSION_SUFFIXES:
        path = FOLDER / f"_{name}{suffix}"
        if path.exists():
            return path
    return None


def _runtime() -> ctypes.c_void_p:
    """Return the address of ENTRY_POINT in torch's OpenMP runtime; null if no runtime is loaded."""
    path = loaded_runtime()
    if path is None:
        log.warning("torch has not loaded an OpenMP runtime; kernels compute with one thread")
        return ctypes.c_void_p()
    loaded = ctypes.CDLL(path)  # returns the loaded copy, and loads no second one
    return ctypes.cast(getattr(loaded, ENTRY_POINT), ctypes.c_void_p)


def loaded_runtime(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Return the path of the OpenMP runtime that torch uses; None if `maps` lists none or cannot be
    read, as on systems other than Linux.

    If several runtimes are loaded, the one in torch's folder is preferred, because another package
    may have loaded the others.
    """
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    found = {line.split(maxsplit=5)[-1].strip() for line in lines}
    names = ("libgomp", "libiomp5", "libomp")
    paths = sorted(path for path in found if Path(path).name.startswith(names))
    torch = importlib.util.find_spec("torch")  # finds its folder without importing it
    home = "" if torch is None or torch.origin is None else str(Path(torch.origin).parent)
    return min(paths, key=lambda path: not path.startswith(home), default=None)
