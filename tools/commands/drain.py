"""`tidegate drain`: an engine finishes what it has, takes nothing new, and leaves.

Its gateways say at once that they are not ready, so whoever balances the load looks elsewhere.
"""

from __future__ import annotations

import argparse
import time

from protocol.client import Engine
from protocol.errors import EngineError
from tools.engine_options import add_place, connect
from tools.failure import Failure

DESCRIPTION = """\
Let an engine finish what it has, refuse what is new, and leave. Its server stops with it. It asks
the engine itself, so it works when HTTP is down.
"""

EXAMPLES = """\
examples:
  tidegate drain                 ask, and leave it to itself
  tidegate drain --wait          stay until it has gone
  tidegate drain --wait --wait-s 60
"""

LOOK_EVERY_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument("--wait", action="store_true", help="stay until it has gone")
    parser.add_argument(
        "--wait-s",
        type=float,
        default=300.0,
        metavar="X",
        help="with --wait: for so many seconds at most, then leave with code 1 "
        "(default %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    with connect(options, "drain") as engine:
        num_open = engine.look(0).num_open
        engine.drain()
        print(f"draining: {num_open} open requests may finish; new ones are refused", flush=True)
        if options.wait:
            _wait(engine, time.monotonic() + options.wait_s)
            print("the engine has gone")
    return 0


def _wait(engine: Engine, give_up: float) -> None:
    """Raises Failure where it is still there then."""
    num_open = 0
    while time.monotonic() < give_up:
        try:
            num_open = engine.look(0).num_open
        except EngineError:
            return
        time.sleep(LOOK_EVERY_S)
    raise Failure(f"the engine is still there, with {num_open} open requests")
