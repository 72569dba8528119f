"""Reads the adapter_config.json of an adapter in PEFT's format. Needs no torch.

Source of the format: `peft.LoraConfig`. Keys that would change the result and are not supported are
refused by name, and so are keys that this file does not list, unless they are null, false or empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.errors import UnusableModel
from worker.lora.errors import UnusableAdapter
from worker.spec.fields import Fields, parsed_json

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
HARMLESS = frozenset(
    {
        "arrow_config",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "alpha_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
"""Keys that are read here, or whose effect is in the names and shapes of the tensors already, or
that matter only in training."""
PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` with which training has not changed the model's own weights."""
DOT = "\0"
"""Stands for a dot with a backslash while a pattern is matched."""
_MODULE_NAME = re.compile(r"\^?(?:\w|\.|\\\.)+\$?")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The rank of each adapted module, and the factor of its term."""

    rank: int
    alpha: float
    uses_root: bool
    #: The end of a module's name -> its own rank, or its own alpha.
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, which is named as in the model's files."""
        return self.ranks.get(_matching(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's term: alpha / rank, or alpha / sqrt(rank)."""
        rank, alpha = (
            self.rank_of(module),
            self.alphas.get(_matching(self.alphas, module), self.alpha),
        )
        return alpha / (math.sqrt(rank) if self.uses_root else rank)


def read_config(path: Path) -> LoraConfig:
    """Return the config in a file. Raises UnusableAdapter, naming the key, if it is damaged, or if
    the adapter needs an unsupported feature."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise UnusableAdapter(f"{CONFIG} has more than {MAX_CONFIG_BYTES:,} bytes")
        values = parsed_json(data)
    except OSError as error:
        raise UnusableAdapter(f"cannot read {CONFIG}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableAdapter(f"{CONFIG} is not valid JSON") from error
    if not isinstance(values, dict):
        raise UnusableAdapter(f"{CONFIG} is not a JSON object")
    try:
        return parse_config(values)
    except UnusableModel as error:
        raise UnusableAdapter(error.message) from None


def parse_config(values: Mapping[str, Any]) -> LoraConfig:
    """Return the config of a parsed adapter_config.json. Raises UnusableModel."""
    fields = Fields(values, CONFIG)
    if fields.text("peft_type") != "LORA":
        raise UnusableModel(f"{CONFIG}: peft_type must be 'LORA'")
    if fields.text("bias", "none") != "none":
        raise UnusableModel(f"{CONFIG}: bias must be 'none'; adapted biases are not supported")
    init = values.get("init_lora_weights")
    if not any(init is each for each in PLAIN_INITS[:3]) and init not in PLAIN_INITS[3:]:
        raise UnusableModel(
            f"{CONFIG}: init_lora_weights {init!r:.40} is not supported, because it changes the "
            "model's own weights; convert the adapter with "
            "path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    for key in sorted(values.keys() - HARMLESS):
        if values[key]:
            raise UnusableModel(f"{CONFIG}: {key} is not supported")
    rank = _rank(fields.integer("r"), "r")
    ranks = {
        name: _rank(value, f"rank_pattern: {name!r:.80}")
        for name, value in _pattern(fields, "rank_pattern").items()
    }
    alphas = Fields(_pattern(fields, "alpha_pattern"), f"{CONFIG}: alpha_pattern")
    return LoraConfig(
        rank=rank,
        alpha=fields.number("lora_alpha"),
        uses_root=fields.flag("use_rslora", False),
        ranks=ranks,
        alphas={name: alphas.number(name) for name in _pattern(fields, "alpha_pattern")},
    )


def _rank(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnusableModel(f"{CONFIG}: {key} must be an integer above zero")
    return value


def _pattern(fields: Fields, key: str) -> Mapping[str, Any]:
    """Return a mapping from module names. PEFT accepts regular expressions. Only names are accepted
    here, because an expression of an unknown file can take forever to match."""
    found = fields.get(key) or {}
    if not isinstance(found, dict):
        raise UnusableModel(f"{CONFIG}: {key} must be an object")
    for name in found:
        if not _MODULE_NAME.fullmatch(name):
            raise UnusableModel(
                f"{CONFIG}: {key} has the pattern {name!r:.80}; only the names of modules, or the "
                "ends of names, are supported"
            )
    return found


def _matching(patterns: Mapping[str, Any], module: str) -> str:
    """Return the first pattern that matches a module's name; "" if none does."""
    return next((pattern for pattern in patterns if _matches(pattern, module)), "")


def _matches(pattern: str, module: str) -> bool:
    """Return whether a pattern matches the whole name of a module or its end after a dot; only the
    whole name if it starts with ^. A dot without a backslash stands for any character, as in
    PEFT."""
    end = pattern.removeprefix("^").removesuffix("$").replace("\\.", DOT)
    start = len(module) - len(end)
    if start < 0 or (start > 0 and (pattern.startswith("^") or module[start - 1] != ".")):
        return False
    pairs = zip(end, module[start:].replace(".", DOT), strict=True)
    return all(ours in (theirs, ".") for ours, theirs in pairs)
