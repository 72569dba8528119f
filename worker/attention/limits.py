"""The models and GPUs that each attention backend supports, as plain data. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.config.worker import AttentionBackend
from worker.errors import UnusableModel

Platform = Literal["cpu", "cuda", "rocm"]
Version = tuple[int, int]
HEAD_DIM_MULTIPLE = 8
"""Libraries load 16 bytes at a time, so a head of 16-bit numbers must be a multiple of them."""


class NoBackend(Exception):
    """A backend cannot be used on this machine. The message gives the reason in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """A machine, and the attention of a model that it is to compute."""

    #: "cuda": an NVIDIA GPU; "rocm": an AMD GPU, which torch calls "cuda" too.
    platform: Platform
    #: Compute capability of an NVIDIA GPU; (0, 0) for all other devices.
    capability: Version
    #: Number of its streaming multiprocessors, or of AMD's compute units.
    num_processors: int
    torch_version: Version
    #: Names of the dtypes of the queries and of the cache, as torch spells them.
    dtype: str
    kv_dtype: str
    #: Most query heads of a layer.
    num_heads: int
    head_dim: int
    block_tokens: int
    #: Whether a layer has sinks, or may have some.
    has_sinks: bool
    has_soft_cap: bool


SMALL_TRITON_DIM, MAX_TRITON_DIM = 256, 512
"""Largest head dims of our Triton kernels. Heads between the two are padded to the larger one, and
have not been tried; those of latents are such heads, or larger ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashLimits:
    """The limits of a FlashAttention library, which computes 16-bit numbers on NVIDIA GPUs."""

    #: Least compute capability.
    capability: Version
    #: Whether the library only has code for GPUs of that major version.
    one_major: bool = False
    #: Least version of torch.
    torch_version: Version
    #: The tokens of a block must be a multiple of this.
    block_multiple: int = 1
    max_head_dim: int = 256
    #: Most query heads of a layer with sinks; 0: no sinks.
    max_sink_heads: int = 0
    has_soft_cap: bool = True

    def reason_against(self, needs: AttentionNeeds) -> str | None:
        """Return why the library cannot compute this attention on this machine; None if it can."""
        if needs.platform != "cuda":
            return "it needs an NVIDIA GPU"
        if self._is_other_gpu(needs.capability):
            found = _dotted(needs.capability)
            return f"this GPU has compute capability {found}; it supports {self._capabilities}"
        if needs.torch_version < self.torch_version:
            found = _dotted(needs.torch_version)
            return f"torch is {found}; it needs {_dotted(self.torch_version)} or later"
        if needs.dtype not in ("bfloat16", "float16"):
            return f"the dtype is {needs.dtype}; it needs bfloat16"
        if needs.kv_dtype != needs.dtype:
            return f"the KV cache is in {needs.kv_dtype}; it needs {needs.dtype}"
        if needs.head_dim > self.max_head_dim or needs.head_dim % HEAD_DIM_MULTIPLE:
            most = f"a multiple of {HEAD_DIM_MULTIPLE} up to {self.max_head_dim}"
            return f"the head dim is {needs.head_dim}; it needs {most}"
        if needs.block_tokens % self.block_multiple:
            multiple = f"a multiple of {self.block_multiple}"
            return f"--block-tokens is {needs.block_tokens}; it needs {multiple}"
        if needs.has_sinks and not self.max_sink_heads:
            return "it does not support attention sinks"
        if needs.has_sinks and needs.num_heads > self.max_sink_heads:
            most = f"at most {self.max_sink_heads}"
            return f"the model has {needs.num_heads} heads with sinks; it supports {most}"
        if needs.has_soft_cap and not self.has_soft_cap:
            return "it does not support soft caps"
        return None

    @property
    def _capabilities(self) -> str:
        if self.one_major:
            return f"only {self.capability[0]}.x"
        return f"{_dotted(self.capability)} and later"

    def _is_other_gpu(self, capability: Version) -> bool:
        is_newer = self.one_major and capability[0] > self.capability[0]
        return is_newer or capability < self.capability


FA3_LIMITS = FlashLimits(
    capability=(9, 0), one_major=True, torch_version=(2, 10), max_sink_heads=64
)
FA2_LIMITS = FlashLimits(capability=(8, 0), torch_version=(2, 10), block_multiple=16)
VARLEN_LIMITS = FlashLimits(
    capability=(8, 0), torch_version=(2, 13), block_multiple=256, has_soft_cap=False
)
"""The limits of `varlen_attn`, which is part of torch. It has block tables since 2.13."""


def reason_against_triton(needs: AttentionNeeds) -> str | None:
    """Return why our Triton kernels cannot compute this attention; None if they can."""
    if needs.platform == "cpu":
        return "it needs a GPU"
    if needs.platform == "cuda" and needs.capability < (8, 0):
        return f"this GPU has compute capability {_dotted(needs.capability)}; it needs 8.0 or later"
    if needs.kv_dtype != needs.dtype:
        return f"the KV cache is in {needs.kv_dtype}; it needs {needs.dtype}"
    if needs.head_dim > SMALL_TRITON_DIM and needs.head_dim != MAX_TRITON_DIM:
        most = f"at most {SMALL_TRITON_DIM}, or {MAX_TRITON_DIM}"
        return f"the head dim is {needs.head_dim}; it needs {most}"
    return None


def check_attention_option(wanted: AttentionBackend, *, is_cpu: bool) -> None:
    """Raise UnusableModel if the option `--attention` has the value `wanted`, but the device has no
    such backend."""
    if is_cpu and wanted in ("flash", "triton"):
        raise UnusableModel(
            f"attention {wanted!r} needs a GPU, but the device is the CPU",
            remedy="serve with --attention auto",
        )


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
