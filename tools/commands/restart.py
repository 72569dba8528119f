"""`tidegate restart`: restarts the engines of a server one after the other, while it serves."""

from __future__ import annotations

import argparse

from protocol.tools.control import RollEnded, RollEngines, RollProgress
from protocol.wire.sockets import run_directory
from tools.failure import Failure
from tools.processes.control_client import ControlClient
from tools.processes.discovery import add_server, local_server

DESCRIPTION = """\
Restart the engines of a server with replicas, one after the other, for example after an upgrade of
Tidegate. Each engine finishes its open requests, exits, and is started again; meanwhile the others
serve. Requests that are still open after --drain-s of the server continue on another replica. If a
new engine does not become ready, the restart stops, and the other engines are left alone.

If this command is interrupted, the restart goes on.
"""

EXAMPLES = """\
examples:
  tidegate restart                your only server on this machine
  tidegate restart --port 8001    the server on this port
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser, takes_argument=True)


def run(options: argparse.Namespace) -> int:
    server = local_server(options)
    # There is no time limit: the supervisor limits each stage, and ends when it is killed.
    with ControlClient(run_directory(server.port), timeout_s=None) as supervisor:
        reply = supervisor.send(RollEngines())
        while isinstance(reply, RollProgress):
            print(f"{reply.number}/{reply.total}  {reply.engine}  {reply.stage}", flush=True)
            reply = supervisor.receive()
    if isinstance(reply, RollEnded) and reply.error:
        raise Failure(f"the restart stopped: {reply.error}; the other engines still serve")
    print("all engines were restarted")
    return 0
