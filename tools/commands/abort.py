"""`tidegate abort`: aborts requests of any client by name.

The name of a request is the `id` in its response. `tidegate top` shows it, too.
"""

from __future__ import annotations

import argparse

from protocol.sdk.client import Client
from protocol.shared.request_ids import MIN_BEGINNING_CHARS, choose, several
from protocol.wire.errors import ServingError
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
    parser.add_argument(
        "names",
        nargs="*",
        metavar="ID",
        help="request to abort; the beginning of its id is enough (at least "
        f"{MIN_BEGINNING_CHARS} characters), if no other request has it",
    )
    parser.add_argument("--all", action="store_true", help="abort all open requests")
    add_engine_options(parser)


def run(options: argparse.Namespace) -> int:
    if bool(options.names) == options.all:
        raise Failure("give request ids or --all", exit_code=2)
    lines: list[str] = []
    with connect(options, "abort") as engine:
        try:
            result = engine.abort_by_label(options.names, everything=options.all)
            lines += (f"aborted  {clean(name)}" for name in result.aborted)
            results = [_abort_begun(engine, text) for text in result.unknown]
        except ServingError as error:
            raise Failure(str(error)) from None
    lines += (line for line, _ in results)
    print("\n".join(lines) if lines else "no open requests")
    return 0 if all(is_aborted for _, is_aborted in results) else 1


def _abort_begun(engine: Client, text: str) -> tuple[str, bool]:
    """Abort the open request whose id begins with `text`, if there is exactly one. Return what to
    print, and whether a request was aborted. Raises ServingError if the engine is lost."""
    found = engine.get_timelines([text], are_beginnings=True).timelines
    names = choose((timeline.name for timeline in found if not timeline.finish), text)
    if len(names) > 1:
        return f"unclear  {several(clean(text), map(clean, names))}", False
    if names and engine.abort_by_label(names).aborted:
        return f"aborted  {clean(names[0])}", True
    return f"unknown  {clean(text)}: no open request has this id", False
