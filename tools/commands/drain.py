"""`tidegate drain`: stops an engine after its open requests finish.

The gateways of the engine report at once that they are not ready, so load balancers stop sending
requests to them.
"""

from __future__ import annotations

import argparse
import time

from protocol.sdk.client import Client
from protocol.wire.errors import EngineError
from tools.failure import Failure
from tools.processes.discovery import add_engine_options, connect

DESCRIPTION = """\
Drain an engine: it finishes its open requests, refuses new ones, and exits. Its server stops with
it. The command connects to the engine directly, so it works when HTTP is down.
"""

EXAMPLES = """\
examples:
  tidegate drain                 start the drain and return
  tidegate drain --wait          wait until the engine has stopped
  tidegate drain --wait --wait-s 60
"""

POLL_EVERY_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser, takes_argument=True)
    parser.add_argument("--wait", action="store_true", help="wait until the engine has stopped")
    parser.add_argument(
        "--wait-s",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="with --wait: exit with code 1 after this many seconds (default %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    with connect(options, "drain") as engine:
        num_open = engine.get_status(0).num_open
        engine.drain()
        print(f"draining: finishing {num_open} open requests, refusing new ones", flush=True)
        if options.wait:
            _wait(engine, time.monotonic() + options.wait_s)
            print("the engine has stopped")
    return 0


def _wait(engine: Client, deadline: float) -> None:
    """Wait until the engine has stopped. Raises Failure if it still runs at `deadline`."""
    num_open = 0
    while time.monotonic() < deadline:
        try:
            num_open = engine.get_status(0).num_open
        except EngineError:
            return
        time.sleep(POLL_EVERY_S)
    raise Failure(
        f"the engine still runs, with {num_open} open requests; to stop it at once, run "
        "on its machine: tidegate stop --kill"
    )
