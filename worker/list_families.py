"""Prints the table of model families of docs/models/families.md."""

from __future__ import annotations

from worker.checkpoint import gguf_families
from worker.models.compiled import why_not
from worker.spec.families.family import ModelFamily
from worker.spec.families.registry import FAMILIES
from worker.spec.kv_blocks import BlockLayers
from worker.spec.model_spec import ModelSpec

BFLOAT16_BYTES = 2
KIB = 1024


def table() -> str:
    """Return a Markdown table with a row for each family."""
    lines = [
        "| family | `model_type` | in GGUF files | K/V of a token | a step on a CPU |",
        "|---|---|---|--:|---|",
    ]
    lines += [
        f"| `{each.architecture}` | `{each.model_type}` | {_gguf(each)} | "
        f"{kv_bytes(each) / KIB:,.4g} KiB | {_path(each)} |"
        for each in FAMILIES
    ]
    return "\n".join(lines)


def kv_bytes(family: ModelFamily) -> int:
    """Return the bytes of a token's keys and values, or latents, in bfloat16, of a model whose
    config has only what it must have."""
    layers = BlockLayers.of(_default_spec(family))
    return 0 if layers.is_empty else layers.token_bytes(lambda dim: BFLOAT16_BYTES * dim)


def _default_spec(family: ModelFamily) -> ModelSpec:
    return family.spec({**family.needed, **family.typical})


def _gguf(family: ModelFamily) -> str:
    names = [
        f"`{name}`"
        for name, each in gguf_families.FAMILIES.items()
        if family.architecture in each.families
    ]
    return ", ".join(names) or "not supported"


def _path(family: ModelFamily) -> str:
    reason = why_not(_default_spec(family))
    return "one call" if not reason else f"by operation: {reason}"


if __name__ == "__main__":
    print(table())
