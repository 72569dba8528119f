"""The timelines of a gateway's last requests."""

from __future__ import annotations

from gateway.generation.recent import MAX_REQUESTS, RecentRequests
from gateway.generation.timeline import Timeline


def test_the_oldest_requests_are_forgotten_unless_their_name_was_used_again() -> None:
    recent = RecentRequests()
    for name in ("old", "again", *map(str, range(MAX_REQUESTS - 2)), "again"):
        recent.add([name], Timeline())
    assert recent.find("old") is None
    assert recent.find("0") is not None
    recent.add(["next"], Timeline())
    assert recent.find("again") is not None
