"""How tools find an engine: the options that say where it is, and a connection to it.

They speak to the engine itself, so they work when HTTP is down. Who may: whoever can enter the run
directory, which is its owner alone, or has the cluster's key.
"""

from __future__ import annotations

import argparse

from protocol.client import Engine
from protocol.errors import EngineNotReady
from protocol.sockets import engine_address
from tools.failure import Failure
from tools.processes.servers import add_server, local_server

WAIT_S = 3.0


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add --port and --url, and --engine with what that may need."""
    add_server(parser)
    parser.add_argument(
        "--engine",
        metavar="ADDRESS",
        help="use the engine at this address (ipc://PATH, tcp://HOST:PORT), not a server",
    )
    parser.add_argument(
        "--cluster-key", default="", metavar="FILE", help="the key of its cluster, for TCP"
    )


def connect(options: argparse.Namespace, name: str) -> Engine:
    """Raises Failure where there is none, or it is not ready."""
    address = options.engine or engine_address(local_server(options).port)
    try:
        return Engine(address, name=name, wait_s=WAIT_S, cluster_key=options.cluster_key)
    except EngineNotReady as error:
        raise Failure(f"the engine is not ready: {error}") from None
    except ValueError as error:
        raise Failure(str(error), exit_code=2) from None
