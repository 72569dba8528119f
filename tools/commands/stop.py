"""`tidegate stop`: stops servers as Ctrl-C does, and removes what was left behind.

The command sends SIGTERM to the supervisor of a server, which then drains the server. If the
supervisor is gone, every process of the server gets SIGTERM. With --kill, every one gets SIGKILL.
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
        metavar="SECONDS",
        help="exit with code 1 if a process still runs after this many seconds "
        "(default %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    names = [] if options.all else options.names or [_selected_name(options)]
    if options.all and (options.names or options.port or options.url):
        raise Failure("give servers or --all, not both", exit_code=2)
    base = base_directory()
    servers = select(discover(base), names)
    targets = [each for server in servers for each in signal_targets(server, kill=options.kill)]
    stopping = [each for server in servers for each in server.processes]
    _signal(targets, signal.SIGKILL if options.kill else signal.SIGTERM)
    _wait_for_exit(stopping, options.wait_s)
    for server in servers:
        _print_result(server, clear(base / server.name))
    if not stopping and not any(server.sockets for server in servers):
        print("no servers were running, and nothing was left behind")
    return 0


def _selected_name(options: argparse.Namespace) -> str:
    """Return the name of the server that --port or --url selects, or of the only one. One of --port
    need not run: what it left behind is removed, as with PORT."""
    if options.port is not None and not options.url:
        return str(options.port)
    return str(local_server(options, otherwise="see: tidegate ps").port)


def select(found: Found, names: Sequence[str]) -> list[RunDirectory]:
    """Return the run directories with these names; all of them if `names` is empty. Raises Failure
    if there is no run directory with one of the names."""
    if not names:
        return found.run_directories
    by_name = {server.name: server for server in found.run_directories}
    for name in names:
        if name not in by_name:
            raise Failure(f"nothing runs at {name}; see: tidegate ps")
    return [by_name[name] for name in dict.fromkeys(names)]


def signal_targets(server: RunDirectory, *, kill: bool) -> list[RunningProcess]:
    """Return the processes of a server that must receive the signal.

    If the supervisor runs, only the supervisor is signalled, because it stops the others. With
    `kill`, or if the supervisor is gone, all processes of the server are signalled.
    """
    if server.is_supervised and not kill:
        return [each for each in server.processes if each.pid == server.pid]
    return server.processes


def _signal(targets: Iterable[RunningProcess], number: signal.Signals) -> None:
    """Send a signal to those of `targets` that still run. The others are skipped, because their
    pids may belong to different processes by now."""
    running = processes()
    for target in targets:
        if _is_running(target, running):
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, number)


def _is_running(process: RunningProcess, running: dict[int, RunningProcess]) -> bool:
    return process.pid in running and running[process.pid].started == process.started


def _wait_for_exit(stopping: Sequence[RunningProcess], wait_s: float) -> None:
    """Wait until the processes have ended. Raises Failure if one still runs after `wait_s`."""
    deadline = time.monotonic() + wait_s
    while left := [each for each in stopping if _is_running(each, processes())]:
        if time.monotonic() >= deadline:
            names = ", ".join(f"{each.name} (pid {each.pid})" for each in left)
            raise Failure(f"still running after {wait_s:g} s: {names}; --kill ends them at once")
        time.sleep(POLL_EVERY_S)


def _print_result(server: RunDirectory, cleared: Sequence[str]) -> None:
    if server.processes:
        print(f"stopped  {server.name} ({len(server.processes)} processes)")
    if cleared:
        print(f"removed  {', '.join(str(Path(server.name) / name) for name in cleared)}")
