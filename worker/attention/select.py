"""Chooses the attention backend.

On the CPU it is the compiled kernels if the model uses them, otherwise torch. On a GPU it is the
first of BACKENDS that supports the GPU and the model, and that can be loaded. The log names it, and
says why each of those before it is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.config.worker import AttentionBackend
from worker.attention.base import Attention
from worker.attention.flash import FlashPagedAttention
from worker.attention.flash_library import FA2, FA3, VARLEN, FlashLibrary, installed_folders
from worker.attention.limits import (
    AttentionNeeds,
    NoBackend,
    check_attention_option,
    reason_against_triton,
)
from worker.attention.native_paged import NativePagedAttention
from worker.attention.torch_paged import TorchPagedAttention
from worker.device import triton_driver
from worker.errors import UnusableModel
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.kernels.reference import TorchKernels

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBackend:
    """A backend for GPUs."""

    #: Name in logs.
    name: str
    #: The value of the option `--attention` that selects it.
    option: AttentionBackend
    #: Whether the option's value "auto" can select it too.
    is_automatic: bool = True
    #: Returns why the backend does not support the GPU or the model; None if it does.
    reason_against: Callable[[AttentionNeeds], str | None]
    #: Returns the backend for a GPU and a model, given the dtype of the queries and the directories
    #: of libraries. Raises NoBackend if it cannot be loaded.
    load: Callable[[AttentionNeeds, torch.dtype, Iterable[Path]], Attention]


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """A backend for a GPU, and why each of those before it is not used."""

    name: str
    attention: Attention
    reasons: Sequence[str]


def select_attention(
    block_tokens: int,
    *,
    dtype: torch.dtype,
    kernels: Kernels | None = None,
    wanted: AttentionBackend = "auto",
    gpu: AttentionNeeds | None = None,
    libraries: Path | None = None,
) -> Attention:
    """Return the attention backend that the option `wanted` selects.

    block_tokens   tokens in a block of the cache
    dtype          dtype of the queries and of the cache
    kernels        kernels that support the model; None means torch's
    gpu            the GPU, and what the model needs of it; None: the device is the CPU
    libraries      directory of `tidegate fetch-kernels`; None: there is none

    Raises UnusableModel if this machine has no such backend.
    """
    check_attention_option(wanted, is_cpu=gpu is None)
    if gpu is not None:
        folders = [*([libraries] if libraries else []), *installed_folders()]
        chosen = choose_backend(wanted, gpu, lambda each: each.load(gpu, dtype, folders))
        log.info("attention=%s%s", chosen.name, "".join(f"; {each}" for each in chosen.reasons))
        return chosen.attention
    kernels = kernels or TorchKernels()
    if isinstance(kernels, NativeKernels) and wanted == "auto":
        return NativePagedAttention(kernels, block_tokens)
    return TorchPagedAttention(block_tokens, dtype)


def choose_backend(
    wanted: AttentionBackend, needs: AttentionNeeds, load: Callable[[GpuBackend], Attention]
) -> ChosenBackend:
    """Return the first backend that the option `wanted` allows, that supports `needs`, and that
    `load` returns. Raises UnusableModel if there is none.

    load   returns the backend's attention, or raises NoBackend
    """
    reasons: list[str] = []
    for backend in BACKENDS:
        if not (backend.is_automatic if wanted == "auto" else backend.option == wanted):
            continue
        reason = backend.reason_against(needs)
        if reason is None:
            try:
                return ChosenBackend(backend.name, load(backend), reasons)
            except NoBackend as error:
                reason = str(error)
        reasons.append(f"{backend.name}: {reason}")
    raise UnusableModel(
        f"--attention {wanted} cannot be used: {'; '.join(reasons)}",
        remedy="serve with --attention auto",
    )


def _flash(library: FlashLibrary, *, is_automatic: bool = True) -> GpuBackend:
    return GpuBackend(
        name=library.name,
        option="flash",
        is_automatic=is_automatic,
        reason_against=library.limits.reason_against,
        load=lambda _needs, _dtype, folders: FlashPagedAttention(library.load(folders)),
    )


def _load_triton(needs: AttentionNeeds, _dtype: torch.dtype, _folders: Iterable[Path]) -> Attention:
    if reason := triton_driver.reason_against_launches():
        raise NoBackend(reason)
    # Triton takes a second to import, and is not needed by the other backends.
    from worker.attention.triton_paged import TritonPagedAttention

    return TritonPagedAttention(needs.block_tokens, num_processors=needs.num_processors)


def _load_torch(needs: AttentionNeeds, dtype: torch.dtype, _folders: Iterable[Path]) -> Attention:
    return TorchPagedAttention(needs.block_tokens, dtype)


BACKENDS = (
    _flash(FA3),
    _flash(FA2),
    # It never splits the keys of a row, which makes small batches slow. So it is only for checks.
    _flash(VARLEN, is_automatic=False),
    GpuBackend(
        name="triton", option="triton", reason_against=reason_against_triton, load=_load_triton
    ),
    GpuBackend(name="torch", option="torch", reason_against=lambda _: None, load=_load_torch),
)
"""The backends for GPUs, the preferred ones first."""
