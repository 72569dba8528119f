"""`tidegate abort`: aborts requests of any client by name.

The name of a request is the `id` in its response. `tidegate top` shows it, too.
"""

from __future__ import annotations

import argparse

from protocol.errors import ServingError
from tools.failure import Failure
from tools.processes.discovery import add_engine_options, connect
from tools.terminal import clean

DESCRIPTION = """\
Abort open requests; the waiting clients are notified. The command connects to the engine directly,
so it works when HTTP is down. It exits with code 1 if an ID matches no open request.
"""

EXAMPLES = """\
examples:
  tidegate abort chatcmpl-7f3a9c             the id from the response, or from tidegate top
  tidegate abort --all
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="ID", help="request to abort")
    parser.add_argument("--all", action="store_true", help="abort all open requests")
    add_engine_options(parser)


def run(options: argparse.Namespace) -> int:
    if bool(options.names) == options.all:
        raise Failure("give request ids or --all", exit_code=2)
    with connect(options, "abort") as engine:
        try:
            result = engine.abort_by_label(options.names, everything=options.all)
        except ServingError as error:
            raise Failure(str(error)) from None
    for name in result.aborted:
        print(f"aborted  {clean(name)}")
    for name in result.unknown:
        print(f"unknown  {clean(name)}: no open request has this id")
    if options.all and not result.aborted:
        print("no open requests")
    return 1 if result.unknown else 0
