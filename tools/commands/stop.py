"""`tidegate stop`: stops servers as Ctrl-C does, and removes what was left behind.

The supervisor receives SIGTERM and drains its server. If the supervisor is gone, each process of
the server receives SIGTERM. Only --kill sends SIGKILL.
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
from tools.processes.discovery import (
    Found,
    RunDirectory,
    RunningProcess,
    add_server,
    base_directory,
    clear,
    discover,
    local_server,
    processes,
)

DESCRIPTION = """\
Stop your servers after their open requests finish. The command also ends processes whose supervisor
is gone, and removes sockets without a process. It does not touch the stray processes that `tidegate
ps` shows, because they belong to no server.
"""

EXAMPLES = """\
examples:
  tidegate stop                your only server on this machine
  tidegate stop 8000           the server on this port
  tidegate stop --all          all your servers and engines on this machine
  tidegate stop 8000 --kill    stop at once; open requests are lost
"""

POLL_EVERY_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="PORT", help="port, or a name from `tidegate ps`"
    )
    add_server(parser)
    parser.add_argument("--all", action="store_true", help="stop all your servers and engines")
    parser.add_argument("--kill", action="store_true", help="kill at once, without a drain")
    parser.add_argument(
        "--wait-s",
        type=float,
        default=60.0,
        metavar="X",
        help="exit with code 1 if a process still runs after this many seconds "
        "(default %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    names = [] if options.all else options.names or [_selected_name(options)]
    if options.all and (options.names or options.port or options.url):
        raise Failure("give servers or --all, not both", exit_code=2)
    base = base_directory()
    places = select(discover(base), names)
    targets = [each for place in places for each in signal_targets(place, kill=options.kill)]
    leaving = [each for place in places for each in place.processes]
    _signal(targets, signal.SIGKILL if options.kill else signal.SIGTERM)
    _wait_for_exit(leaving, options.wait_s)
    for place in places:
        _print_result(place, clear(base / place.name))
    if not leaving and not any(place.sockets for place in places):
        print("no servers were running, and nothing was left behind")
    return 0


def _selected_name(options: argparse.Namespace) -> str:
    """Return the name of the server that --port or --url selects, or of the only one."""
    return str(local_server(options, otherwise="see: tidegate ps").port)


def select(found: Found, names: Sequence[str]) -> list[RunDirectory]:
    """Return the run directories with these names, or all if `names` is empty. Raises Failure."""
    if not names:
        return found.places
    by_name = {place.name: place for place in found.places}
    for name in names:
        if name not in by_name:
            raise Failure(f"nothing runs at {name}; see: tidegate ps")
    return [by_name[name] for name in dict.fromkeys(names)]


def signal_targets(place: RunDirectory, *, kill: bool) -> list[RunningProcess]:
    """Return the processes to signal.

    If the supervisor runs, it is the only one, because it stops the others. With `kill`, all
    processes are returned.
    """
    if place.leads and not kill:
        return [each for each in place.processes if each.pid == place.pid]
    return place.processes


def _signal(targets: Iterable[RunningProcess], number: signal.Signals) -> None:
    """Signal the processes, except any whose pid belongs to another process by now."""
    running = processes()
    for target in targets:
        if _is_running(target, running):
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, number)


def _is_running(process: RunningProcess, running: dict[int, RunningProcess]) -> bool:
    return process.pid in running and running[process.pid].started == process.started


def _wait_for_exit(leaving: Sequence[RunningProcess], wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while left := [each for each in leaving if _is_running(each, processes())]:
        if time.monotonic() >= deadline:
            names = ", ".join(f"{each.name} (pid {each.pid})" for each in left)
            raise Failure(f"still running after {wait_s:g} s: {names}; --kill ends them at once")
        time.sleep(POLL_EVERY_S)


def _print_result(place: RunDirectory, cleared: Sequence[str]) -> None:
    if place.processes:
        print(f"stopped  {place.name} ({len(place.processes)} processes)")
    if cleared:
        print(f"removed  {', '.join(str(Path(place.name) / name) for name in cleared)}")
