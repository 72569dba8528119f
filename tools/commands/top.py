"""`tidegate top`: shows the state of an engine, and updates it regularly on a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque

import msgspec

from protocol.engine.session import PING_EVERY_S
from protocol.sdk.client import Client
from protocol.shared.watch import EngineFrame, EngineWatcher
from protocol.wire.errors import ServingError
from tools.failure import Failure
from tools.processes.discovery import add_engine_options, connect
from tools.terminal import use_colors
from tools.top.picture import Canvas, TopScene, render
from tools.top.screen import open_screen

DESCRIPTION = """\
Watch an engine: slots, blocks, tokens per second, and each open request by name, without its text.
Press q to quit. If the output is not a terminal, the state is printed once. The command connects to
the engine directly, so it works when HTTP is down. It gives the engine work only while it runs.
"""

EXAMPLES = """\
examples:
  tidegate top
  tidegate top --once                    print the state once, as text
  tidegate top --json                    print the state once, as JSON
  tidegate top --engine tcp://host:5600 --cluster-key cluster.key
"""

KEPT_FRAMES = 120
"""Number of past frames that are kept, for the curve of tokens per second."""
ALL_ROWS = 1000
ONCE_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser, takes_argument=True)
    parser.add_argument("--once", action="store_true", help="print the state once and exit")
    parser.add_argument("--json", action="store_true", help="print the state once, as JSON")
    parser.add_argument(
        "--every-s",
        type=float,
        default=PING_EVERY_S,
        metavar="SECONDS",
        help="seconds between updates (default %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    if not 0.05 <= options.every_s <= 3600:
        raise Failure("--every-s must be from 0.05 to 3600", exit_code=2)
    with connect(options, "top") as engine:
        is_watched = sys.stdin.isatty() and sys.stdout.isatty()
        try:
            if options.once or options.json or not is_watched:
                print(_once(engine, options))
            else:
                _watch(engine, options.every_s)
        except ServingError as error:
            raise Failure(str(error)) from None
    return 0


def _once(engine: Client, options: argparse.Namespace) -> str:
    """Return the engine's status as text or JSON.

    The status is fetched twice, because a rate is the difference between two statuses.
    """
    watcher = EngineWatcher(engine.model.name)
    frames = [watcher.push(engine.get_status(0), engine.limits)]
    time.sleep(options.every_s)
    now = engine.get_status(ALL_ROWS)
    frames.append(watcher.push(now, engine.limits))
    if options.json:
        facts = {"model": engine.model.name, "limits": engine.limits, "rates": frames[-1].rates}
        return msgspec.json.encode({**facts, "view": now}).decode()
    scene = TopScene(engine.model.name, engine.limits, frames)
    return "\n".join(render(scene, Canvas(ONCE_WIDTH, has_colours=use_colors())))


def _watch(engine: Client, every_s: float) -> None:
    """Update the screen until the user quits. If the engine is lost, keep trying."""
    watcher = EngineWatcher(engine.model.name)
    frames: deque[EngineFrame] = deque(maxlen=KEPT_FRAMES)
    error_text = ""
    with open_screen(has_colours=use_colors()) as screen:
        polled_at = float("-inf")
        while True:
            if time.monotonic() - polled_at >= every_s:
                polled_at = time.monotonic()
                try:
                    status = engine.get_status(screen.canvas.height or ALL_ROWS)
                    frames.append(watcher.push(status, engine.limits))
                    error_text = ""
                except ServingError as error:
                    error_text = str(error)
            if frames:
                scene = TopScene(engine.model.name, engine.limits, list(frames), error_text)
                screen.show(render(scene, screen.canvas))
            if not screen.wait(max(0.0, polled_at + every_s - time.monotonic())):
                return
