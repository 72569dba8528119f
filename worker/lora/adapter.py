"""Reads adapters in PEFT's format: a directory with adapter_config.json and
adapter_model.safetensors.

An adapted module computes y = W x + scale * B A x. Its tensors are named after the module:
`base_model.model.` + its name + `.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank]. Each
tensor must be used, and have the shape that the model requires.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from worker.checkpoint.huggingface import SafetensorsWeights
from worker.checkpoint.safetensors_files import DTYPE_BYTES, SafetensorsFiles
from worker.errors import UnusableModel
from worker.lora.config import CONFIG, LoraConfig, read_config
from worker.lora.errors import MissingAdapter, UnusableAdapter
from worker.lora.targets import Target
from worker.spec.model_spec import AdaptedLinear
from worker.spec.wrappers import text_name

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """The LoRA term of one module: scale * up^T (down x)[start : start + rank]. It is added to the
    outputs [first, first + outputs) of the linear that computes the module.

    start   index of the module's first row in `LowRankTerm.down`
    up      [rank, outputs]
    """

    start: int
    first: int
    scale: float
    up: Tensor

    @property
    def rank(self) -> int:
        return self.up.shape[0]

    @property
    def outputs(self) -> int:
        return self.up.shape[1]


@dataclass(frozen=True, slots=True)
class LowRankTerm:
    """The LoRA term of one linear: the terms of its modules, such as those of queries, keys and
    values. The modules read the same input.

    down   [sum of the parts' ranks, inputs]
    """

    down: Tensor
    parts: tuple[LowRankPart, ...]

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def tensors(self) -> list[Tensor]:
        return [self.down, *(part.up for part in self.parts)]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter.

    digest   hash of the adapter's files; equal for equal files
    rank     the largest rank of the adapted modules
    terms    (layer, linear) -> the term of that linear
    """

    digest: str
    rank: int
    terms: Mapping[tuple[int, AdaptedLinear], LowRankTerm]

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for term in self.terms.values() for t in term.tensors())

    @property
    def widest(self) -> int:
        """The largest number of rows of `LowRankTerm.down`."""
        return max(term.rank for term in self.terms.values())


class AdapterFiles:
    """Reads the adapters of one model.

    targets     the modules of the model
    root        directory from which adapters may be loaded while the worker runs; "": none may be
    max_rank    refuse adapters with a larger rank
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        root: str,
        *,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._targets = targets
        self._root = root
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device

    def read(self, path: str, *, is_trusted: bool = False) -> Adapter:
        """Return the adapter in a directory; see `read_adapter` for errors.

        is_trusted   whether the directory may be outside of the root, because the operator's
                     configuration names it
        """
        folder = Path(path) if is_trusted else find_adapter(path, self._root)
        return read_adapter(
            folder,
            self._targets,
            max_rank=self._max_rank,
            dtype=self._dtype,
            device=self._device,
        )


def find_adapter(path: str, root: str) -> Path:
    """Return the directory of an adapter that a client has named.

    root   the directory from which adapters may be loaded; a relative path is relative to it

    Raises MissingAdapter unless the directory and the files in it are inside of `root`, after
    symbolic links are followed.
    """
    missing = MissingAdapter("there is no adapter at this path in the directory --lora-dir")
    try:
        allowed = Path(root).resolve(strict=True)
        folder = (allowed / path).resolve(strict=True)
        files = [folder / name for name in (CONFIG, WEIGHTS, PICKLE)]
        inside = [each.resolve() for each in (folder, *files)]
        if not folder.is_dir() or not all(each.is_relative_to(allowed) for each in inside):
            raise missing
    except (OSError, ValueError, RuntimeError):  # missing, no text of a path, a loop of links
        raise missing from None
    return folder


def read_adapter(
    folder: Path,
    targets: Mapping[str, Target],
    *,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Adapter:
    """Read the adapter in a directory.

    targets    the modules of the model (targets.py)
    max_rank   refuse an adapter with a larger rank
    dtype      number type of the result, which is the model's

    Raises MissingAdapter if the directory has no adapter, and UnusableAdapter, naming the key or
    the tensor, if the adapter is damaged or does not fit the model.
    """
    config_file, weights_file = folder / CONFIG, folder / WEIGHTS
    if not config_file.is_file():
        raise MissingAdapter(f"the adapter's directory has no {CONFIG}")
    if not weights_file.is_file():
        if (folder / PICKLE).exists():
            raise UnusableAdapter(
                f"{PICKLE} is a pickle, which can run code; save the adapter as {WEIGHTS}, as "
                "PEFT's save_pretrained does by default"
            )
        raise MissingAdapter(f"the adapter's directory has no {WEIGHTS}")
    before = _content([config_file, weights_file])
    config = read_config(config_file)
    try:
        files = SafetensorsFiles([weights_file])
        modules = _modules(files, config, targets, max_rank)
        source = SafetensorsWeights(files)
        with torch.inference_mode():
            terms = _Reader(source, config, dtype, device).terms(modules)
    except UnusableModel as error:
        raise UnusableAdapter(error.message.replace(str(folder), "").lstrip("/")) from None
    except OSError as error:
        raise UnusableAdapter(f"cannot read {WEIGHTS}: {error.strerror}") from error
    if _content([config_file, weights_file]) != before:
        raise UnusableAdapter("the adapter's files changed while they were read")
    return Adapter(before, max(config.rank_of(name) for name in modules), terms)


def _content(files: list[Path]) -> str:
    """Return the hex SHA-256 of the whole content of the files. It is part of the hashes of cached
    blocks, so it must differ for any two adapters."""
    whole = hashlib.sha256()
    try:
        for path in files:
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise UnusableAdapter(f"cannot read {path.name}: {error.strerror}") from error
    return whole.hexdigest()


def _modules(
    files: SafetensorsFiles, config: LoraConfig, targets: Mapping[str, Target], max_rank: int
) -> dict[str, Target]:
    """Return the modules that an adapter changes, by name, after checking all tensors of its file.
    They may have the names that they have inside a model of images or sound.

    Raises UnusableAdapter, naming the tensor, if a tensor is missing, is unknown, or has a wrong
    shape or type, or if a rank exceeds `max_rank`.
    """
    found: dict[str, Target] = {}
    known = set()
    for name in files.tensors:
        ending = next((end for end in (DOWN, UP) if name.endswith(end)), None)
        module = name.removeprefix(PREFIX).removesuffix(ending or "")
        target = targets.get(module) or targets.get(text_name(module) or "")
        if ending is None or target is None:
            raise UnusableAdapter(
                f"{WEIGHTS}: {name!r:.200} cannot be applied: this server adapts "
                f"{_kinds(targets)} of this model"
            )
        found[module] = target
    if not found:
        raise UnusableAdapter(f"{WEIGHTS} has no tensors")
    for module, target in found.items():
        rank = config.rank_of(module)
        if rank > max_rank:
            raise UnusableAdapter(
                f"{CONFIG}: rank {rank} of {module} exceeds --max-lora-rank {max_rank}"
            )
        shapes = {DOWN: (rank, target.inputs), UP: (target.outputs, rank)}
        for ending, shape in shapes.items():
            name = f"{PREFIX}{module}{ending}"
            stored = files.tensors.get(name)
            if stored is None:
                raise UnusableAdapter(f"{WEIGHTS} lacks the tensor {name!r}")
            if stored.shape != shape:
                raise UnusableAdapter(
                    f"{WEIGHTS}: {name} has shape {stored.shape}; the model and {CONFIG} require "
                    f"{shape}"
                )
            if stored.dtype not in DTYPE_BYTES:
                raise UnusableAdapter(f"{WEIGHTS}: {name} has the type {stored.dtype:.20}")
            known.add(name)
    if others := sorted(files.tensors.keys() - known):
        raise UnusableAdapter(f"{WEIGHTS}: {others[0]!r:.200} is not named as PEFT names tensors")
    return found


def _kinds(targets: Mapping[str, Target]) -> str:
    """Return the distinct last parts of the modules' names, such as "q_proj, v_proj", for
    messages."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in targets))


class _Reader:
    """Reads the tensors of checked modules."""

    def __init__(
        self,
        source: SafetensorsWeights,
        config: LoraConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._source = source
        self._config = config
        self._dtype = dtype
        self._device = device

    def terms(self, modules: Mapping[str, Target]) -> dict[tuple[int, AdaptedLinear], LowRankTerm]:
        by_linear: dict[tuple[int, AdaptedLinear], list[tuple[str, Target]]] = {}
        for name, target in modules.items():
            by_linear.setdefault((target.layer, target.linear), []).append((name, target))
        return {place: self._term(parts) for place, parts in by_linear.items()}

    def _term(self, modules: list[tuple[str, Target]]) -> LowRankTerm:
        modules = sorted(modules, key=lambda each: each[1].first)
        ranks = [self._config.rank_of(name) for name, _ in modules]
        down = self._empty(sum(ranks), modules[0][1].inputs)
        parts, start = [], 0
        for (name, target), rank in zip(modules, ranks, strict=True):
            self._source.read_into(f"{PREFIX}{name}{DOWN}", down[start : start + rank])
            parts.append(
                LowRankPart(
                    start, target.first, self._config.scale_of(name), self._up(name, target)
                )
            )
            start += rank
        return LowRankTerm(down, tuple(parts))

    def _up(self, name: str, target: Target) -> Tensor:
        """Return the transposed matrix B [rank, outputs], with the outputs in the model's order."""
        rank = self._config.rank_of(name)
        matrix = self._empty(target.outputs, rank)
        self._source.read_into(f"{PREFIX}{name}{UP}", matrix)
        if target.order is not None:
            rows = target.order.file_rows_of(len(matrix))
            matrix = matrix[torch.tensor(rows, device=matrix.device)]
        return matrix.t().contiguous()

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self._dtype, device=self._device)
