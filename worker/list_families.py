"""Prints the table of model families of docs/models.md."""

from __future__ import annotations

from worker.checkpoint import gguf_header
from worker.models.compiled import why_not
from worker.spec.families.family import ModelFamily
from worker.spec.families.registry import FAMILIES


def table() -> str:
    """Return a Markdown table with a row for each family."""
    lines = ["| family | `model_type` | in GGUF files | a step on a CPU |", "|---|---|---|---|"]
    lines += [
        f"| `{each.architecture}` | `{each.model_type}` | {_gguf(each)} | {_path(each)} |"
        for each in FAMILIES
    ]
    return "\n".join(lines)


def _gguf(family: ModelFamily) -> str:
    names = [
        f"`{name}`"
        for name, each in gguf_header.FAMILIES.items()
        if family.architecture in each.families
    ]
    return ", ".join(names) or "not supported"


def _path(family: ModelFamily) -> str:
    reason = why_not(family.spec({**family.needed, **family.typical}))
    return "one call" if not reason else f"by operation: {reason}"


if __name__ == "__main__":
    print(table())
