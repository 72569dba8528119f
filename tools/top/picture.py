"""Views of an engine as lines of text, with or without colours. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from protocol.messages import EngineStatus, Limits, RequestView
from tools.printable import clean, cut
from tools.top.rates import Rates, rates

MIN_WIDTH = 40
NAME_WIDTH = 24
BLOCKS, EMPTY = " ▏▎▍▌▋▊▉█", "░"
LEVELS = "▁▂▃▄▅▆▇█"
FAINT, BOLD, GREEN, YELLOW, RED, CYAN, PLAIN = (
    f"\x1b[{code}m" for code in ("2", "1", "32", "33", "31", "36", "0")
)
BUSY, FULL = 0.7, 0.9
"""Of a bar: from here on it is yellow, and red."""
STAGE_COLOURS = {"decode": GREEN, "prefill": CYAN, "preempted": RED}


@dataclass(frozen=True, slots=True)
class TopScene:
    """What is drawn. views: the latest last; at least one."""

    model: str
    limits: Limits
    views: Sequence[EngineStatus]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Paper:
    """What it is drawn on. height: lines; None: as many as it takes."""

    width: int = 100
    height: int | None = None
    has_colours: bool = False

    def ink(self, text: str, *codes: str) -> str:
        return "".join(codes) + text + PLAIN if self.has_colours and text else text


def picture(scene: TopScene, paper: Paper) -> list[str]:
    """Lines of at most the paper's width, as terminals count it, and at most its height."""
    paper = Paper(max(paper.width, MIN_WIDTH), paper.height, paper.has_colours)
    lines = [*_head(scene, paper), *_gauges(scene, paper), ""]
    room = None if paper.height is None else paper.height - len(lines)
    return [*lines, *_rows(scene.views[-1], paper, room)][: paper.height]


def _head(scene: TopScene, paper: Paper) -> list[str]:
    view = scene.views[-1]
    state = "draining" if view.stats.draining else "serving"
    if scene.trouble:
        state = scene.trouble
    colour = GREEN if state == "serving" else YELLOW
    title = clean(f"tidegate top  {scene.model}")
    room = paper.width - len(title) - 2
    return [paper.ink(cut(title, paper.width), BOLD) + "  " + paper.ink(cut(state, room), colour)]


def _gauges(scene: TopScene, paper: Paper) -> list[str]:
    view, limits = scene.views[-1], scene.limits
    stats = view.stats
    now = rates(scene.views[-2], view) if len(scene.views) > 1 else Rates()
    used = stats.total_blocks - stats.free_blocks
    waiting = f"waiting {stats.waiting:,} ({stats.waiting_tokens:,} tokens)"
    kept = f"{stats.leased_blocks:,} kept for others" if stats.leased_blocks else ""
    lines = [
        _gauge("slots", stats.running, limits.max_slots, waiting, paper),
        _gauge("blocks", used, stats.total_blocks, kept, paper),
        _gauge("busy", round(now.busy * 100), 100, f"{now.steps_per_s:,.0f} steps/s", paper, "%"),
    ]
    words = f"tokens   {now.tokens_per_s:,.0f}/s answered  {now.computed_per_s:,.0f}/s computed"
    line = curve([rates(a, b).tokens_per_s for a, b in pairwise(scene.views)], 30)
    lines.append(cut(words, paper.width) + paper.ink(_rest(line, words, paper), CYAN))
    facts = [
        f"cache    {_percent(now.cache_hits)} hits",
        *([f"drafts {_percent(now.drafts_right)} right"] if stats.num_draft_tokens else []),
        f"{now.requests_per_s:,.1f} requests/s",
        f"refused {stats.num_refused + stats.num_refused_early:,}",
        f"preempted {stats.num_preemptions:,}",
        f"clients {stats.clients}",
    ]
    return [*lines, cut("  ".join(facts), paper.width)]


def _rest(line: str, words: str, paper: Paper) -> str:
    room = paper.width - len(words) - 2
    return "  " + line[-room:] if room > 0 and line else ""


def _gauge(name: str, part: int, whole: int, beside: str, paper: Paper, unit: str = "") -> str:
    counts = f"{part:,}{unit}" if unit else f"{part:,}/{whole:,}"
    size = max(8, min(32, paper.width - 60))
    share = part / whole if whole else 0.0
    colour = RED if share >= FULL else YELLOW if share >= BUSY else GREEN
    text = cut(f"  {counts:<14}{beside}", paper.width - 9 - size)
    return f"{name:<9}" + paper.ink(bar(share, size), colour) + text.rstrip()


def bar(share: float, width: int) -> str:
    """Filled to eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    whole, part = divmod(eighths, 8)
    filled = BLOCKS[-1] * whole + (BLOCKS[part] if part else "")
    return filled + EMPTY * (width - len(filled))


def curve(values: Sequence[float], width: int) -> str:
    """The last values, from nothing up to the highest of them."""
    last = values[-width:]
    top = max(last, default=0.0)
    if top <= 0:
        return ""
    return "".join(LEVELS[min(7, int(value / top * 7.999))] for value in last)


# ---- the requests


def _rows(view: EngineStatus, paper: Paper, room: int | None) -> list[str]:
    """room: lines; None: as many as it takes. The last one counts what is not shown."""
    head = f"{'request':<{NAME_WIDTH}} {'stage':<9} {'age':>7} {'prompt':>7} {'cached':>7} "
    head += f"{'answer':>13} {'tokens/s':>8}  {'account':<12} client"
    shown = len(view.rows)
    if room is not None and 1 + shown + (view.num_open > shown) > room:
        shown = max(0, room - 2)
    lines = [paper.ink(cut(head, paper.width), FAINT)]
    lines += [_row(row, paper) for row in view.rows[:shown]]
    left = view.num_open - shown
    return [*lines, paper.ink(f"and {left:,} more", FAINT)] if left else lines


def _row(row: RequestView, paper: Paper) -> str:
    speed = row.generated_tokens / row.decode_s if row.decode_s > 0 else 0.0
    answer = f"{row.generated_tokens:,}/{row.most_tokens:,}"
    name = f"{cut(clean(row.name), NAME_WIDTH):<{NAME_WIDTH}} "
    stage = f"{row.stage:<9} "
    told = f"{age(row.age_s):>7} {row.prompt_tokens:>7,} {row.cached_tokens:>7,} {answer:>13} "
    told += f"{speed:>8.1f}  {cut(clean(row.account), 12):<12} {clean(row.client)}"
    room = paper.width - len(name) - len(stage)
    return name + paper.ink(stage, STAGE_COLOURS.get(row.stage, YELLOW)) + cut(told, room).rstrip()


def age(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f} %"
