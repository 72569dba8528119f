"""`tidegate stop`: ends servers as Ctrl-C does, and whatever was left behind.

A server is asked, and drains; where its supervisor is gone its processes are asked one and all.
Nothing is killed unless --kill says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.failure import Failure
from tools.processes.server_discovery import (
    Found,
    RunDirectory,
    RunningProcess,
    base_directory,
    clear,
    look,
    processes,
)
from tools.processes.servers import add_server, local_server

DESCRIPTION = """\
Stop servers of this user: open requests may finish. What was left behind goes as well: processes
whose supervisor is gone, and sockets that nobody answers. Strays that `ps` shows belong to no
server that could be named here; whoever started them may want them.
"""

EXAMPLES = """\
examples:
  tidegate stop                the only server that runs here
  tidegate stop 8000           the server on that port
  tidegate stop --all          all servers and engines of this user on this machine
  tidegate stop 8000 --kill    at once; what was open is lost
"""

LOOK_EVERY_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="PORT", help="or a name that `ps` shows")
    add_server(parser)
    parser.add_argument("--all", action="store_true", help="all of this user")
    parser.add_argument("--kill", action="store_true", help="at once, without asking")
    parser.add_argument(
        "--wait-s",
        type=float,
        default=60.0,
        metavar="X",
        help="leave with code 1 when they are not gone by then (default %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    names = [] if options.all else options.names or [_only(options)]
    if options.all and (options.names or options.port or options.url):
        raise Failure("name servers or use --all, not both", exit_code=2)
    base = base_directory()
    places = chosen(look(base), names)
    victims = [each for place in places for each in asked(place, everybody=options.kill)]
    leaving = [each for place in places for each in place.processes]
    _signal(victims, signal.SIGKILL if options.kill else signal.SIGTERM)
    _await_end(leaving, options.wait_s)
    for place in places:
        _tell(place, clear(base / place.name))
    if not leaving and not any(place.sockets for place in places):
        print("nothing ran, and nothing was left behind")
    return 0


def _only(options: argparse.Namespace) -> str:
    """Return the name of the server that --port or --url names, or of the only one."""
    return str(local_server(options, otherwise="see: tidegate ps").port)


def chosen(found: Found, names: Sequence[str]) -> list[RunDirectory]:
    """No names: all there is. Raises Failure where there is no such place."""
    if not names:
        return found.places
    by_name = {place.name: place for place in found.places}
    for name in names:
        if name not in by_name:
            raise Failure(f"nothing runs at {name}; see: tidegate ps")
    return [by_name[name] for name in dict.fromkeys(names)]


def asked(place: RunDirectory, *, everybody: bool) -> list[RunningProcess]:
    """Who gets the signal: the first process, which sees to the others, if it is there."""
    if place.leads and not everybody:
        return [each for each in place.processes if each.pid == place.pid]
    return place.processes


def _signal(victims: Iterable[RunningProcess], number: signal.Signals) -> None:
    """Nobody who is another by now."""
    running = processes()
    for victim in victims:
        if _is_there(victim, running):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, number)


def _is_there(process: RunningProcess, running: dict[int, RunningProcess]) -> bool:
    return process.pid in running and running[process.pid].started == process.started


def _await_end(leaving: Sequence[RunningProcess], wait_s: float) -> None:
    give_up = time.monotonic() + wait_s
    while left := [each for each in leaving if _is_there(each, processes())]:
        if time.monotonic() >= give_up:
            who = ", ".join(f"{each.name} (pid {each.pid})" for each in left)
            raise Failure(f"still there after {wait_s:g} s: {who}; --kill ends them at once")
        time.sleep(LOOK_EVERY_S)


def _tell(place: RunDirectory, cleared: Sequence[str]) -> None:
    if place.processes:
        print(f"stopped  {place.name} ({len(place.processes)} processes)")
    if cleared:
        print(f"removed  {', '.join(str(Path(place.name) / name) for name in cleared)}")
