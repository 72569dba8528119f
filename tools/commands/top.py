"""`tidegate top`: looks once a second, while somebody watches; once where nobody does."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque

import msgspec

from protocol.client import Engine
from protocol.errors import ServingError
from protocol.messages import EngineStatus
from protocol.session import PING_EVERY_S
from tools.engine_options import add_place, connect
from tools.failure import Failure
from tools.top.picture import Paper, TopScene, picture
from tools.top.rates import rates
from tools.top.screen import opened

DESCRIPTION = """\
Watch an engine: slots, blocks, tokens per second, and each open request, by name and never by its
words. It asks the engine itself, so it works when HTTP is down; an engine that nobody watches
spends nothing on it. q leaves. Where the output is no terminal, one picture is printed.
"""

EXAMPLES = """\
examples:
  tidegate top
  tidegate top --once                    one picture, as text
  tidegate top --json                    the same for programs
  tidegate top --engine tcp://host:5600 --cluster-key cluster.key
"""

KEPT_VIEWS = 120
ALL_ROWS = 1000
ONCE_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument("--once", action="store_true", help="print one picture and leave")
    parser.add_argument("--json", action="store_true", help="print what it shows as one JSON line")
    parser.add_argument(
        "--every-s",
        type=float,
        default=PING_EVERY_S,
        metavar="X",
        help="seconds between two looks (default %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    if not 0.05 <= options.every_s <= 3600:
        raise Failure("--every-s is 0.05 to 3600 seconds", exit_code=2)
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


def _once(engine: Engine, options: argparse.Namespace) -> str:
    """Two looks: rates are differences."""
    before = engine.look(0)
    time.sleep(options.every_s)
    view = engine.look(ALL_ROWS)
    if options.json:
        told = {"model": engine.model.name, "limits": engine.limits, "rates": rates(before, view)}
        return msgspec.json.encode({**told, "view": view}).decode()
    scene = TopScene(engine.model.name, engine.limits, [before, view])
    return "\n".join(picture(scene, Paper(ONCE_WIDTH, has_colours=_wants_colours())))


def _wants_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _watch(engine: Engine, every_s: float) -> None:
    """Until somebody leaves. An engine that is lost is waited for."""
    views: deque[EngineStatus] = deque(maxlen=KEPT_VIEWS)
    trouble = ""
    with opened(has_colours=_wants_colours()) as screen:
        looked_at = float("-inf")
        while True:
            if time.monotonic() - looked_at >= every_s:
                looked_at = time.monotonic()
                try:
                    views.append(engine.look(screen.paper.height or ALL_ROWS))
                    trouble = ""
                except ServingError as error:
                    trouble = str(error)
            if views:
                scene = TopScene(engine.model.name, engine.limits, list(views), trouble)
                screen.show(picture(scene, screen.paper))
            if not screen.wait(max(0.0, looked_at + every_s - time.monotonic())):
                return
