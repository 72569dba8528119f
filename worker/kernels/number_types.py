"""The number types that a worker computes in: those that its kernels compute fastest, unless the
operator chooses others.

torch is not imported, because the memory plan needs the types before it is.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from protocol.config.worker import KVDtype, WorkerConfig
from worker.kernels.library import first_compiled, selected

FloatType = Literal["bfloat16", "float32"]
TORCH = "torch"
BFLOAT16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names of CPU features in /proc/cpuinfo; the last one is ARM's. Without any of them torch emulates
bfloat16, which is slow."""


class FastTypes(NamedTuple):
    """The number types in which some kernels compute steps fastest."""

    dtype: FloatType
    #: Whether products of integers take less time than those of floats, so that rounding the inputs
    #: of quantised weights to eight bits saves time.
    multiplies_integers: bool
    #: "auto": that of `dtype`.
    kv_dtype: KVDtype


FASTEST = {
    "avx512bf16": FastTypes("bfloat16", True, "auto"),
    "avx512": FastTypes("float32", True, "bfloat16"),
    "avxvnni": FastTypes("float32", True, "bfloat16"),
    "avx2": FastTypes("float32", True, "bfloat16"),
    "i8mm": FastTypes("float32", True, "bfloat16"),
    "neon": FastTypes("float32", True, "bfloat16"),
    "generic": FastTypes("float32", False, "auto"),
}
"""Instruction set -> its types, by the measurements in docs/contribute/number-formats.md. `avxvnni`
and the sets of ARM have not been measured: like `avx2`, they multiply bytes and floats. Attention
that reads float32 waits for memory, so keys and values are faster in bfloat16. They are nowhere
rounded to eight bits: that would be faster still, at a small loss of quality."""
ON_GPU = FastTypes("bfloat16", False, "auto")


class NumberTypes(NamedTuple):
    """The number types of one worker."""

    dtype: FloatType
    kv_dtype: KVDtype
    #: Whether `--activations auto` rounds the inputs of quantised weights in float32, too.
    rounds_floats: bool
    #: Why the types were chosen, for the log.
    reason: str


def number_types(config: WorkerConfig, *, is_gpu: bool, cpu_flags: frozenset[str]) -> NumberTypes:
    """Return the types that `config` asks for. Options that are "auto" follow the best instruction
    set that `--kernels` allows, but if `--dtype` is given, nothing else is rounded further: who
    asks for float32 gets float32.

    If two sets compete by their speed (select.py), the types are those of the better one, so that
    machines of one kind have the same.

    cpu_flags   the processor's features, from `cpuinfo.cpu_flags`
    """
    kernels = "a GPU" if is_gpu else _kernels(config, cpu_flags)
    fast = ON_GPU if is_gpu else fast_types(kernels, cpu_flags)
    if config.dtype != "auto":
        return NumberTypes(config.dtype, config.kv_dtype, False, f"--dtype is {config.dtype}")
    kv_dtype = fast.kv_dtype if config.kv_dtype == "auto" else config.kv_dtype
    reason = f"this is fastest with {'' if is_gpu else 'the kernels '}{kernels}"
    return NumberTypes(fast.dtype, kv_dtype, fast.multiplies_integers, reason)


def fast_types(kernels: str, cpu_flags: frozenset[str]) -> FastTypes:
    """Return the types of an instruction set, or of torch's kernels on this processor."""
    if kernels != TORCH:
        return FASTEST[kernels]
    return FastTypes("bfloat16" if cpu_flags & BFLOAT16_CPU_FLAGS else "float32", False, "auto")


def _kernels(config: WorkerConfig, cpu_flags: frozenset[str]) -> str:
    """Return the name of the kernels that a worker uses on a CPU."""
    return first_compiled(selected(config.kernels, cpu_flags)) or TORCH
