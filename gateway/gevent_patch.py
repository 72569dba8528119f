"""Makes the standard library cooperate with gevent."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from gevent import events, monkey


def patch_standard_library() -> None:
    """Patch all modules that gevent can patch. A second call, such as gunicorn's, has no effect.

    gevent calls plugins before and after it patches each module. It would search for them 25 times
    in all installed distributions, which takes 0.2 s of CPU time if there are a hundred.
    """
    installed = metadata.entry_points()

    def notify(event: Any) -> None:
        events.notify(event)
        for plugin in installed.select(group=event.ENTRY_POINT_NAME):
            plugin.load()(event)

    search = events.notify_and_call_entry_points
    events.notify_and_call_entry_points = notify
    try:
        monkey.patch_all()
    finally:
        events.notify_and_call_entry_points = search
