"""The rows of the table that a run writes, and the table as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

Outcome = Literal["passed", "failed", "not run", "measured", "met", "missed"]


class GpuRow(msgspec.Struct, frozen=True, kw_only=True):
    """A result of a stage: a check, a figure, or why there is none.

    The outcome of a check is "passed" or "failed", and that of a figure "measured", or "met" or
    "missed" if it has a goal.
    """

    name: str
    outcome: Outcome
    #: The figure with its unit, or what was compared.
    text: str = ""
    goal: str = ""
    #: The figure alone, in the unit of `text`.
    value: float | None = None
    #: Name of the stage. `processes.py` sets it.
    stage: str = ""


class NotPossible(Exception):
    """This machine lacks what a stage needs. The message says what."""


def passed(name: str, text: str) -> GpuRow:
    return GpuRow(name=name, outcome="passed", text=text)


def failed(name: str, why: str) -> GpuRow:
    return GpuRow(name=name, outcome="failed", text=why)


def not_run(name: str, why: str) -> GpuRow:
    return GpuRow(name=name, outcome="not run", text=why)


def checked(name: str, text: str, *, is_right: bool) -> GpuRow:
    return passed(name, text) if is_right else failed(name, text)


def figure(
    name: str,
    value: float,
    unit: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    text: str = "",
) -> GpuRow:
    """Return the row of a figure, with at most one goal.

    text   further figures, which are shown behind the first one
    """
    goal, outcome = "", "measured"
    if at_most is not None:
        goal, outcome = f"<= {at_most:,.4g} {unit}", "met" if value <= at_most else "missed"
    if at_least is not None:
        goal, outcome = f">= {at_least:,.4g} {unit}", "met" if value >= at_least else "missed"
    shown = f"{value:,.4g} {unit}" + (f" ({text})" if text else "")
    return GpuRow(name=name, outcome=outcome, text=shown, goal=goal, value=value)  # type: ignore[arg-type]


def markdown(facts: Mapping[str, str], rows: Iterable[GpuRow], *, title: str) -> str:
    """Return the facts about a run and its rows as a page."""
    lines = [f"# {title}", "", *(f"- {name}: {fact}" for name, fact in facts.items()), ""]
    cells: list[Sequence[str]] = [
        ("stage", "what", "result", "goal", ""),
        ("---",) * 5,
        *((row.stage, row.name, row.text, row.goal, row.outcome) for row in rows),
    ]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in cells]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
