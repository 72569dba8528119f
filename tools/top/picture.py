"""Draws the frames of an engine (protocol/shared/watch.py) as lines of text. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from protocol.engine.messages import Limits
from protocol.engine.usage import RequestStatus
from protocol.shared.explain import duration
from protocol.shared.watch import EngineFrame, Percentiles
from tools.terminal import clean, cut, memory_size

MIN_WIDTH = 40
NAME_WIDTH = 24
BLOCKS, EMPTY = " ▏▎▍▌▋▊▉█", "░"
LEVELS = "▁▂▃▄▅▆▇█"
FAINT, BOLD, GREEN, YELLOW, RED, CYAN, PLAIN = (
    f"\x1b[{code}m" for code in ("2", "1", "32", "33", "31", "36", "0")
)
BUSY, FULL = 0.7, 0.9
"""A bar is yellow from the first share on, and red from the second."""
STAGE_COLOURS = {"decode": GREEN, "prefill": CYAN, "preempted": RED}


@dataclass(frozen=True, slots=True)
class TopScene:
    """The state of an engine to draw."""

    model: str
    limits: Limits
    #: The last frames, at least one, the newest last.
    frames: Sequence[EngineFrame]
    #: Why the engine does not answer; "" if it does.
    error: str = ""


@dataclass(frozen=True, slots=True)
class Canvas:
    """The size of the output in characters and lines, and whether it has colours."""

    width: int = 100
    #: None: no limit. Ids of requests are then not cut either, so that they can be copied.
    height: int | None = None
    has_colours: bool = False

    def style(self, text: str, *codes: str) -> str:
        """Return `text` in the style of these escape codes; unchanged if there are no colours."""
        return "".join(codes) + text + PLAIN if self.has_colours and text else text


def render(scene: TopScene, canvas: Canvas) -> list[str]:
    """Return the picture of `scene` as lines that fit into the canvas. A canvas narrower than
    MIN_WIDTH is treated as MIN_WIDTH wide."""
    canvas = Canvas(max(canvas.width, MIN_WIDTH), canvas.height, canvas.has_colours)
    lines = [*_head(scene, canvas), *_gauges(scene, canvas), ""]
    room = None if canvas.height is None else canvas.height - len(lines)
    return [*lines, *_rows(scene.frames[-1], canvas, room)][: canvas.height]


def _head(scene: TopScene, canvas: Canvas) -> list[str]:
    state = "draining" if scene.frames[-1].stats.draining else "serving"
    if scene.error:
        state = scene.error
    colour = GREEN if state == "serving" else YELLOW
    title = clean(f"tidegate top  {scene.model}")
    room = canvas.width - len(title) - 2
    return [
        canvas.style(cut(title, canvas.width), BOLD) + "  " + canvas.style(cut(state, room), colour)
    ]


def _gauges(scene: TopScene, canvas: Canvas) -> list[str]:
    frame, limits = scene.frames[-1], scene.limits
    stats, now = frame.stats, frame.rates
    used = stats.total_blocks - stats.free_blocks
    waiting = f"waiting {stats.waiting:,} ({stats.waiting_tokens:,} tokens)"
    kept = f"{stats.leased_blocks:,} kept for other engines" if stats.leased_blocks else ""
    lines = [
        _gauge("slots", stats.running, limits.max_slots, waiting, canvas),
        _gauge("blocks", used, stats.total_blocks, kept, canvas),
        *_states(scene, canvas),
        _gauge("busy", round(now.busy * 100), 100, f"{now.steps_per_s:,.0f} steps/s", canvas, "%"),
    ]
    words = f"tokens   {now.tokens_per_s:,.0f}/s answered  {now.computed_per_s:,.0f}/s computed"
    line = curve([each.rates.tokens_per_s for each in scene.frames[1:]], 30)
    lines.append(cut(words, canvas.width) + canvas.style(_rest(line, words, canvas), CYAN))
    facts = [
        f"cache    {_percent(now.cache_hits)} hits",
        *([f"{_percent(now.recomputed)} again"] if now.recomputed is not None else []),
        *([f"drafts {_percent(now.drafts_right)} right"] if stats.num_draft_tokens else []),
        f"{now.requests_per_s:,.1f} requests/s",
        f"refused {stats.num_refused + stats.num_refused_early:,}",
        f"preempted {stats.num_preemptions:,}",
        f"clients {stats.clients}",
    ]
    lines.append(cut("  ".join(facts), canvas.width))
    latencies = [
        *_latency("first token", frame.first_token),
        *_latency("gap between tokens", frame.gap),
    ]
    return [*lines, cut("latency  " + "  ".join(latencies), canvas.width)] if latencies else lines


def _states(scene: TopScene, canvas: Canvas) -> list[str]:
    """Return a bar with the checkpoints that requests hold, with the memory of recurrent states in
    words; nothing if the model has none."""
    stats, size = scene.frames[-1].stats, scene.limits.state_bytes
    if not size:
        return []
    used = memory_size(sum(stats.state_bytes.values()))
    beside = f"{used} of {memory_size(stats.reserved_state_bytes)}, {memory_size(size)} each"
    if stats.total_checkpoints:
        beside = f"{stats.cached_checkpoints:,} cached, {beside}"
    return [_gauge("states", stats.held_checkpoints, stats.total_checkpoints, beside, canvas)]


def _latency(name: str, found: Percentiles | None) -> list[str]:
    """Return the median and the 99th percentile of a latency in words; nothing if it is None."""
    if found is None:
        return []
    return [f"{name} {duration(found.p50)}, 99 % below {duration(found.p99)}"]


def _rest(line: str, words: str, canvas: Canvas) -> str:
    room = canvas.width - len(words) - 2
    return "  " + line[-room:] if room > 0 and line else ""


def _gauge(name: str, part: int, whole: int, beside: str, canvas: Canvas, unit: str = "") -> str:
    counts = f"{part:,}{unit}" if unit else f"{part:,}/{whole:,}"
    size = max(8, min(32, canvas.width - 60))
    share = part / whole if whole else 0.0
    colour = RED if share >= FULL else YELLOW if share >= BUSY else GREEN
    text = cut(f"  {counts:<14}{beside}", canvas.width - 9 - size)
    return f"{name:<9}" + canvas.style(bar(share, size), colour) + text.rstrip()


def bar(share: float, width: int) -> str:
    """Return a bar as text, with a resolution of an eighth of a character.

    share   the filled share of the bar
    """
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    whole, part = divmod(eighths, 8)
    filled = BLOCKS[-1] * whole + (BLOCKS[part] if part else "")
    return filled + EMPTY * (width - len(filled))


def curve(values: Sequence[float], width: int) -> str:
    """Return a curve of the last `width` values as text, scaled to the highest of them. Return ""
    if none is above 0."""
    last = values[-width:]
    top = max(last, default=0.0)
    if top <= 0:
        return ""
    return "".join(LEVELS[min(7, int(value / top * 7.999))] for value in last)


# ---- the requests


def _rows(frame: EngineFrame, canvas: Canvas, room: int | None) -> list[str]:
    """Return the table of requests in at most `room` lines. If not all requests fit, the last line
    says how many are left out."""
    width = NAME_WIDTH
    if canvas.height is None:
        width = max(width, *(len(clean(row.name)) for row in frame.requests), 0)
        canvas = replace(canvas, width=canvas.width + width - NAME_WIDTH)
    head = f"{'request':<{width}} {'stage':<9} {'age':>7} {'prompt':>7} {'cached':>7} "
    head += f"{'answer':>13} {'tokens/s':>8}  {'account':<12} client"
    shown = len(frame.requests)
    if room is not None and 1 + shown + (frame.num_open > shown) > room:
        shown = max(0, room - 2)
    lines = [canvas.style(cut(head, canvas.width), FAINT)]
    lines += [_row(row, canvas, width) for row in frame.requests[:shown]]
    left = frame.num_open - shown
    return [*lines, canvas.style(f"and {left:,} more", FAINT)] if left else lines


def _row(row: RequestStatus, canvas: Canvas, name_width: int) -> str:
    speed = row.generated_tokens / row.decode_s if row.decode_s > 0 else 0.0
    answer = f"{row.generated_tokens:,}/{row.most_tokens:,}"
    name = f"{cut(clean(row.name), name_width):<{name_width}} "
    stage = f"{row.stage:<9} "
    rest = f"{age(row.age_s):>7} {row.prompt_tokens:>7,} {row.cached_tokens:>7,} {answer:>13} "
    rest += f"{speed:>8.1f}  {cut(clean(row.account), 12):<12} {clean(row.client)}"
    room = canvas.width - len(name) - len(stage)
    return (
        name + canvas.style(stage, STAGE_COLOURS.get(row.stage, YELLOW)) + cut(rest, room).rstrip()
    )


def age(seconds: float) -> str:
    """Return the age of a request as short text: "7.5 s", "12 min", "3 h"."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f} %"
