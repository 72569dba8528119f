"""How the kernel reports processes that it has killed for lack of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.process_state import num_oom_kills

EVENTS = "low 0\nhigh 0\nmax 7\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [
        ("0::/user.slice/a.scope", "user.slice/a.scope/memory.events", EVENTS),
        ("0::/", "memory.events", EVENTS),
        ("0::/not/seen/from/here", "memory.events", EVENTS),
        ("9:cpu:/x\n4:memory:/docker/7\n0::/", "memory/docker/7/memory.oom_control", CONTROL),
        ("4:memory:/docker/7", "memory/memory.oom_control", CONTROL),
    ],
)
def test_the_oom_kills_of_this_control_group_are_counted(
    tmp_path: Path, membership: str, file: str, text: str
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(membership + "\n")
    assert num_oom_kills(proc, cgroups) is None
    (cgroups / file).parent.mkdir(parents=True)
    (cgroups / file).write_text(text.format(3))
    assert num_oom_kills(proc, cgroups) == 3


def test_a_system_without_control_groups_says_nothing(tmp_path: Path) -> None:
    assert num_oom_kills(tmp_path, tmp_path) is None
