"""The picture of `tidegate top`: its content, its size, and that no name controls a terminal."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from protocol.engine.messages import EngineStatus, Limits
from protocol.engine.stats import EngineStats
from protocol.engine.usage import RequestStatus
from protocol.shared.latency import NUM_BUCKETS, bucket
from protocol.shared.watch import EngineFrame, EngineWatcher
from tools.terminal import clean
from tools.top.picture import Canvas, TopScene, age, bar, curve, render

LIMITS = Limits(
    max_len=512, max_slots=8, block_tokens=16, num_blocks=101, token_budget=64, prefix_cache=True
)
INK = re.compile(r"\x1b\[\d+m")


def a_view(
    now_s: float = 10.0, *rows: RequestStatus, num_open: int | None = None, **stats
) -> EngineStatus:
    told = EngineStats(**{"running": 2, "total_blocks": 100, "free_blocks": 50, **stats})
    count = len(rows) if num_open is None else num_open
    return EngineStatus(request=1, now_s=now_s, stats=told, num_open=count, rows=list(rows))


def a_row(name: str = "chatcmpl-1", **more) -> RequestStatus:
    fields = {"client": "gateway-7", "account": "alice", "stage": "decode", "age_s": 2.5}
    return RequestStatus(name=name, **{**fields, **more})


def frames_of(*views: EngineStatus) -> list[EngineFrame]:
    watcher = EngineWatcher("tiny")
    return [watcher.push(view, LIMITS) for view in views]


def drawn(*views: EngineStatus, **paper) -> list[str]:
    return render(TopScene("tiny", LIMITS, frames_of(*views)), Canvas(**paper))


def test_the_picture_shows_the_engines_load_and_requests() -> None:
    row = a_row(prompt_tokens=20, cached_tokens=16, generated_tokens=30, decode_s=2.0)
    view = a_view(11.0, row, waiting=3, waiting_tokens=1234, num_generated_tokens=50)
    text = "\n".join(drawn(a_view(10.0), view, width=120))
    assert "\x1b" not in text
    for words in ("tiny  serving", "2/8", "waiting 3 (1,234 tokens)", "50/100", "50/s answered"):
        assert words in text
    (line,) = [line for line in text.splitlines() if "chatcmpl-1" in line]
    assert line.split() == ["chatcmpl-1", "decode", "2.5", "s", "20", "16", "30/0", "15.0", *END]


END = ["alice", "gateway-7"]


def test_the_picture_shows_latencies_once_there_are_any() -> None:
    assert not any("latency" in line for line in drawn(a_view(1.0), a_view(2.0)))
    counts = [0] * NUM_BUCKETS
    counts[bucket(0.05)] = 9
    later = msgspec.structs.replace(a_view(2.0), gaps=counts)
    (line,) = [each for each in drawn(a_view(1.0), later, width=120) if "latency" in each]
    assert "gap between tokens 5" in line
    assert " ms, 99 % below " in line


def test_a_hybrid_shows_its_checkpoints_and_the_memory_of_its_states() -> None:
    mib = 1 << 20
    states: dict[str, Any] = {
        "total_checkpoints": 32,
        "held_checkpoints": 4,
        "cached_checkpoints": 9,
        "state_bytes": {"slots": 100 * mib, "checkpoints": 650 * mib},
        "reserved_state_bytes": 2048 * mib,
    }
    views = [
        a_view(10.0, **states),
        a_view(11.0, **states, num_prompt_tokens=200, num_uncovered_tokens=50),
    ]
    limits = msgspec.structs.replace(LIMITS, state_bytes=50 * mib, num_checkpoints=32)
    lines = render(TopScene("tiny", limits, frames_of(*views)), Canvas(width=120))
    (line,) = [each for each in lines if each.startswith("states")]
    assert line.endswith("  4/32          9 cached, 750.0 MiB of 2.00 GiB, 50.0 MiB each")
    assert any(each.startswith("cache    0 % hits  25 % again") for each in lines)
    assert not any("states" in each or "again" in each for each in drawn(a_view(1.0), a_view(2.0)))


def test_the_first_line_shows_that_an_engine_drains_or_is_lost() -> None:
    assert "draining" in drawn(a_view(draining=True))[0]
    scene = TopScene("tiny", LIMITS, frames_of(a_view()), "the engine has been silent for 4.0 s")
    assert "silent for 4.0 s" in render(scene, Canvas())[0]


@pytest.mark.parametrize("width", [10, 40, 61, 80, 200])
@pytest.mark.parametrize("height", [5, 9, 12, 37, 38])
def test_the_picture_fits_any_terminal(width: int, height: int) -> None:
    rows = [a_row("x" * 90, account="y" * 90, client="z" * 90) for _ in range(30)]
    views = [a_view(s, *rows, num_generated_tokens=s * s, num_draft_tokens=s) for s in range(90)]
    lines = drawn(*views, width=width, height=height, has_colours=True)
    assert len(lines) <= height
    assert max(len(INK.sub("", line)) for line in lines) <= max(width, 40)
    shown = sum("xxx" in line for line in lines)
    assert shown == {5: 0, 9: 0, 12: 3, 37: 28, 38: 30}[height]
    assert height == 5 or (f"and {30 - shown} more" in lines[-1]) == (shown < 30)


def test_ids_are_whole_if_the_state_is_printed_once() -> None:
    ids = [f"chatcmpl-{'7f3a9c04' * 4}", "x" * 300]
    rows = [a_row(each, account="alice") for each in ids]
    lines = drawn(a_view(1.0, *rows), width=120)
    shown = [line.split()[0] for line in lines[-2:]]
    assert shown == ids
    assert all(line.endswith("alice        gateway-7") for line in lines[-2:])
    assert len({line.index("decode") for line in lines[-2:]}) == 1
    (cut,) = drawn(a_view(1.0, rows[0]), width=120, height=40)[-1:]
    assert ids[0].startswith(cut.split()[0].removesuffix("…")), "why and abort accept it"


def test_hidden_rows_are_counted() -> None:
    rows = [a_row(f"r{i}") for i in range(5)]
    assert drawn(a_view(1.0, *rows, num_open=12))[-1] == "and 7 more"
    assert "more" not in drawn(a_view(1.0, *rows))[-1]


def test_no_name_controls_the_terminal() -> None:
    evil = "a\x1b[2Jb\rc\x07d\u202ee\u0301f語"
    assert clean(evil) == "a?[2Jb?c?d?e?f?"
    lines = drawn(a_view(1.0, a_row(evil, account=evil, client=evil)), width=200)
    assert all(line.isprintable() for line in lines)


def test_bars_and_curves_grow_with_their_values() -> None:
    bars = [bar(share / 80, 10) for share in range(81)]
    assert (bars[0], bars[40], bars[80]) == ("░" * 10, "█" * 5 + "░" * 5, "█" * 10)
    assert len(set(bars)) == 81
    assert {len(each) for each in bars} == {10}
    assert bar(7.0, 3) == "███"
    line = curve([1, 2, 3, 4], 3)
    assert len(line) == 3
    assert all(a < b for a, b in pairwise(line))
    assert curve([0, 0], 5) == curve([], 5) == ""


def test_ages_are_short() -> None:
    assert [age(s) for s in (0.04, 99.0, 600.0, 90_000.0)] == ["0.0 s", "99.0 s", "10 min", "25 h"]
