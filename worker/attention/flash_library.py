"""Finds and loads FlashAttention libraries.

The files belong to the package vLLM. They depend neither on that package nor on the version of
Python, and use only the stable ABI of torch. So they are loaded as they are, from the directory of
`tidegate fetch-kernels`, or from an installed vLLM without importing it. A file only registers
operators with torch. An operator is used only if its arguments are exactly those that are listed
here, because a call with other arguments could read wrong memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from worker.attention.flash import FlashArguments, FlashFunction
from worker.attention.limits import (
    FA2_LIMITS,
    FA3_LIMITS,
    VARLEN_LIMITS,
    FlashLimits,
    NoBackend,
)

INSTALLED = (("vllm_flash_attn", ""), ("vllm", "vllm_flash_attn"))
"""Packages that may contain the files, each with the directory inside the package."""
FETCH = "tidegate fetch-kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashOperator:
    """An operator that a file registers with torch as `torch.ops.NAMESPACE.NAME`."""

    file: str
    namespace: str
    name: str
    #: Names of all arguments, in order.
    arguments: Sequence[str]
    #: Argument -> its name in FlashArguments, if that is another one.
    renamed: Mapping[str, str]
    #: Argument -> its value in each call. An argument that is neither here nor in FlashArguments is
    #: None.
    fixed: Mapping[str, Any]
    #: Whether the keys of a row may be split between processors only if each row has one query.
    splits_single_queries_only: bool


class OperatorFunction:
    """Calls an operator as a FlashFunction. The arguments are passed by position, which takes half
    as long as by name."""

    def __init__(self, operator: Any, described: FlashOperator) -> None:
        names = described.arguments
        self._operator = operator
        self._values = [described.fixed.get(name) for name in names]
        keys = [described.renamed.get(name, name) for name in names]
        given = FlashArguments.__required_keys__
        self._places = [(place, key) for place, key in enumerate(keys) if key in given]
        self._window, self._splits = names.index("window_size_left"), names.index("num_splits")
        self._splits_single_queries_only = described.splits_single_queries_only
        self._has_sinks = "s_aux" in names

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, **arguments: Unpack[FlashArguments]
    ) -> Tensor:
        if arguments["s_aux"] is not None and not self._has_sinks:
            raise ValueError("this FlashAttention library has no attention sinks")
        values = self._values.copy()
        values[:3] = q, k, v
        for place, key in self._places:
            values[place] = arguments[key]  # type: ignore[literal-required]
        values[self._window : self._window + 2] = arguments["window_size"]
        is_whole = self._splits_single_queries_only and arguments["max_seqlen_q"] > 1
        values[self._splits] = 1 if is_whole else 0  # 0: the library chooses
        out: Tensor = self._operator(*values)[0]
        return out


FA3_OPERATOR = FlashOperator(
    file="_vllm_fa3_C.abi3.so",
    namespace="_vllm_fa3_C",
    name="fwd",
    arguments=(
        *("q", "k", "v", "k_new", "v_new", "q_v", "out"),
        *("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k"),
        *("max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k"),
        *("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
        *("softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap"),
        *("is_rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin"),
        *("s_aux", "cp_world_size", "cp_rank", "cp_tot_seqused_k"),
    ),
    renamed={"page_table": "block_table", "is_causal": "causal"},
    fixed={"is_rotary_interleaved": True, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0},
    splits_single_queries_only=False,
)
FA2_OPERATOR = FlashOperator(
    file="_vllm_fa2_C.abi3.so",
    namespace="_vllm_fa2_C",
    name="varlen_fwd",
    arguments=(
        *("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k"),
        *("block_table", "alibi_slopes", "max_seqlen_q", "max_seqlen_k", "p_dropout"),
        *("softmax_scale", "zero_tensors", "is_causal", "window_size_left", "window_size_right"),
        *("softcap", "return_softmax", "num_splits", "gen"),
    ),
    # It requires a tensor of the shape of `cu_seqlens_k`, but reads `seqused_k` in its place.
    renamed={"cu_seqlens_k": "cu_seqlens_q", "is_causal": "causal"},
    fixed={"p_dropout": 0.0, "zero_tensors": False, "return_softmax": False},
    splits_single_queries_only=True,
)


def varlen_function(varlen_attn: Callable[..., Any]) -> FlashFunction:
    """Return torch's `varlen_attn` as a FlashFunction."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: Unpack[FlashArguments]) -> Tensor:
        if arguments["s_aux"] is not None or arguments["softcap"]:
            raise ValueError("torch's varlen_attn has neither attention sinks nor a soft cap")
        out: Tensor = varlen_attn(
            q,
            k,
            v,
            arguments["cu_seqlens_q"],
            arguments["cu_seqlens_q"],  # as in FA2_OPERATOR
            arguments["max_seqlen_q"],
            arguments["max_seqlen_k"],
            scale=arguments["softmax_scale"],
            # (n, 0) means causal for every n.
            window_size=(arguments["window_size"][0], 0),
            enable_gqa=q.shape[1] != k.shape[2],
            seqused_k=arguments["seqused_k"],
            block_table=arguments["block_table"],
            # With a block table, torch's own choice can leave rows of the result unwritten.
            num_splits=1,
        )
        return out

    return attend


def load_operator(described: FlashOperator, folders: Iterable[Path]) -> Any:
    """Return the operator, loaded from the first file in `folders` that can be loaded. Raises
    NoBackend if there is no such file, or if it has another operator than expected."""
    found = _registered(described)
    if found is None:  # a second registration would end the process
        path = _load_first(described.file, folders)
        found = _registered(described)
        if found is None:
            raise NoBackend(f"{path} has no operator {described.name!r}")
    names = [argument.name for argument in found._schema.arguments]
    if names != [*described.arguments]:
        raise NoBackend(
            f"the operator {described.name!r} of {described.file} has other arguments than expected"
        )
    return found


def _load_first(file: str, folders: Iterable[Path]) -> Path:
    """Load the first `file` in `folders` that can be loaded, and return its path. Raises NoBackend
    with all reasons if there is none."""
    reasons = []
    for path in [path for folder in folders if (path := folder / file).is_file()]:
        try:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
            return path
        except OSError as error:
            reasons.append(f"{path} cannot be loaded: {_reason(error)}")
    raise NoBackend("; ".join(reasons) or f"not installed (see: {FETCH} --help)")


def _registered(described: FlashOperator) -> Any | None:
    """Return the operator if it is registered with torch."""
    packet = getattr(getattr(torch.ops, described.namespace), described.name, None)
    return getattr(packet, "default", None)


def _reason(error: OSError) -> str:
    """Return the loader's own message in one line. torch's message only repeats the path."""
    return " ".join(str(error.__cause__ or error).split())


def load_varlen(_: Iterable[Path]) -> FlashFunction:
    """Return torch's own function. Raises NoBackend if this version of torch does not have
    it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise NoBackend(f"torch does not have it: {error}") from None
    return varlen_function(varlen_attn)


def installed_folders() -> list[Path]:
    """Return the directories of installed packages that may contain the files. The packages are not
    imported, because importing vLLM takes seconds and changes the process."""
    folders = []
    for package, inside in INSTALLED:
        spec = importlib.util.find_spec(package)
        folders += [
            Path(place) / inside for place in (spec and spec.submodule_search_locations) or ()
        ]
    return folders


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashLibrary:
    """A FlashAttention library: what it supports, and how to load it."""

    #: Name in logs.
    name: str
    limits: FlashLimits
    #: Loads the library. The argument gives the directories that may contain its file. Raises
    #: NoBackend.
    load: Callable[[Iterable[Path]], FlashFunction]


def _from_file(name: str, limits: FlashLimits, described: FlashOperator) -> FlashLibrary:
    def load(folders: Iterable[Path]) -> FlashFunction:
        return OperatorFunction(load_operator(described, folders), described)

    return FlashLibrary(name=name, limits=limits, load=load)


FA3 = _from_file("FA3", FA3_LIMITS, FA3_OPERATOR)
FA2 = _from_file("FA2", FA2_LIMITS, FA2_OPERATOR)
VARLEN = FlashLibrary(name="varlen_attn", limits=VARLEN_LIMITS, load=load_varlen)
