"""Options that select an engine, and a connection to it.

Tools connect to the engine directly, so they work when HTTP is down. Access requires entry to the
run directory, which only its owner has, or the cluster key.
"""

from __future__ import annotations

import argparse

from protocol.client import Client
from protocol.errors import EngineNotReady
from protocol.sockets import engine_address
from tools.failure import Failure
from tools.processes.servers import add_server, local_server

WAIT_S = 3.0


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add --port, --url, --engine and --cluster-key."""
    add_server(parser)
    parser.add_argument(
        "--engine",
        metavar="ADDRESS",
        help="use the engine at this address (ipc://PATH or tcp://HOST:PORT) instead of a server",
    )
    parser.add_argument(
        "--cluster-key", default="", metavar="FILE", help="cluster key file; required for TCP"
    )


def connect(options: argparse.Namespace, name: str) -> Client:
    """Connect to the engine that the options select. Raises Failure if it is not ready.

    name   this client's name, as the engine logs it
    """
    address = options.engine or engine_address(local_server(options).port)
    try:
        return Client(address, name=name, wait_s=WAIT_S, cluster_key=options.cluster_key)
    except EngineNotReady as error:
        raise Failure(f"the engine is not ready: {error}") from None
    except ValueError as error:
        raise Failure(str(error), exit_code=2) from None
