"""`tidegate abort`: end requests by their names, whoever asked for them.

A name is what a client was told (the `id` of its answer), or what `tidegate top` shows.
"""

from __future__ import annotations

import argparse

from protocol.errors import ServingError
from tools.engine_options import add_place, connect
from tools.failure import Failure
from tools.printable import clean

DESCRIPTION = """\
End requests: those who wait for them are told that they were aborted. It asks the engine itself, so
it works when HTTP is down. Leaves with code 1 where a name is of no open request.
"""

EXAMPLES = """\
examples:
  tidegate abort chatcmpl-7f3a9c             the id that its client was told, or top shows
  tidegate abort --all
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="ID", help="of requests")
    parser.add_argument("--all", action="store_true", help="all that are open")
    add_place(parser)


def run(options: argparse.Namespace) -> int:
    if bool(options.names) == options.all:
        raise Failure("name requests, or say --all", exit_code=2)
    with connect(options, "abort") as engine:
        try:
            told = engine.abort_named(options.names, everything=options.all)
        except ServingError as error:
            raise Failure(str(error)) from None
    for name in told.aborted:
        print(f"aborted  {clean(name)}")
    for name in told.unknown:
        print(f"unknown  {clean(name)}: no open request is called so")
    if options.all and not told.aborted:
        print("nothing was open")
    return 1 if told.unknown else 0
