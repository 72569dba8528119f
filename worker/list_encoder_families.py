"""Prints the table of encoders of docs/models/encoders.md."""

from __future__ import annotations

from worker.encoders.families.family import SCORES
from worker.encoders.families.registry import FAMILIES
from worker.encoders.gguf import ENCODERS


def table() -> str:
    """Return a Markdown table with a row for each family of encoders."""
    lines = [
        "| classes | `model_type` | with `" + SCORES + "` | in GGUF files |",
        "|---|---|---|---|",
    ]
    for family in FAMILIES:
        classes = ", ".join(f"`{name}`" for name in family.architectures if SCORES not in name)
        scores = any(SCORES in name for name in family.architectures)
        types = ", ".join(f"`{name}`" for name in family.model_types)
        files = [
            f"`{name}`"
            for name, each in ENCODERS.items()
            if set(each.families) & set(family.architectures)
        ]
        gguf = ", ".join(files) or "not supported"
        lines.append(f"| {classes} | {types} | {'scores' if scores else 'no'} | {gguf} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
