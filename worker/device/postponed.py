"""Postpones parts of `import torch` that eager computation on real tensors does not use.

torch implements the shapes of about a thousand operators in Python, in the module TORCH_SHAPES.
They serve compilers and tensors without memory (the device "meta"). This module and those that it
imports (`torch._decomp`, `torch._refs`, `torch._prims`) take a quarter of the time of
`import torch`. In torch 2.13, `torch.Generator` and CUDA's generators need these modules, too.

The packages in TORCH_UNUSED export, train, quantise or profile models. They take an eighth of the
time.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TORCH_SHAPES = "torch._meta_registrations"
TORCH_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._prims")
"""Modules that need TORCH_SHAPES to be executed before them. torch imports them late, for example
when a profile starts."""
TORCH_UNUSED = (
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.nn.attention",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.utils.data",
)
"""Packages that `import torch` imports, but of which neither it nor the start of a worker uses a
name. The libraries that use them, such as transformers, import them."""
CHECKED_VERSIONS = ("2.13.",)
"""Starts of the versions of torch in which the worker was tested with these parts postponed."""


class PostponedLoader(Loader):
    """Leaves a module empty until one of its names is used, or until `load`.

    importlib's LazyLoader is not suitable, because it executes the module when any attribute is
    read. While torch is imported, `inspect` reads `__file__` of all modules.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader: Loader | None = loader

    def exec_module(self, module: ModuleType) -> None:
        def load_and_get(name: str) -> Any:
            if name.startswith("__") or self._loader is None:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            self.load(module)
            return getattr(module, name)

        module.__dict__["__getattr__"] = load_and_get

    def load(self, module: ModuleType) -> None:
        """Execute the module, unless that was done before."""
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.exec_module(module)


class PostponingFinder(MetaPathFinder):
    """Finds the modules that are the keys of `dependents`, and gives each a PostponedLoader. Such a
    module is executed before one of its dependents, or a module that lies in it, is imported."""

    def __init__(self, dependents: Mapping[str, Collection[str]]) -> None:
        self._names = frozenset(dependents)
        self._needed = {each: name for name, those in dependents.items() for each in those}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._needed:
            load_postponed(self._needed[fullname])
        package = fullname.rpartition(".")[0]
        if package in self._names:
            load_postponed(package)
        if fullname not in self._names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = PostponedLoader(spec.loader)
        return spec


def postpone_torch_parts(version: str, *, is_gpu: bool) -> None:
    """Postpone TORCH_SHAPES and TORCH_UNUSED if the installed torch allows it.

    version   of the installed torch
    is_gpu    whether it is built for GPUs
    """
    if version.startswith(CHECKED_VERSIONS) and not is_gpu:
        postpone({TORCH_SHAPES: TORCH_COMPILERS, **dict.fromkeys(TORCH_UNUSED, ())})


def postpone(dependents: Mapping[str, Collection[str]]) -> None:
    """Postpone the execution of modules, if they have not been imported yet.

    dependents   the modules, each with those that need it: it is executed before one of them is
                 imported
    """
    sys.meta_path.insert(0, PostponingFinder(dependents))


def load_postponed(name: str) -> None:
    """Execute the module `name` now, if it was imported and its execution was postponed."""
    module = sys.modules.get(name)
    spec = None if module is None else module.__spec__
    if module is not None and spec is not None and isinstance(spec.loader, PostponedLoader):
        spec.loader.load(module)
