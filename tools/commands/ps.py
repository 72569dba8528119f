"""`tidegate ps`: lists the user's servers on this machine, and what was left behind."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from protocol.process.process_state import TITLE_PREFIX, memory_bytes, process_age_s
from tools.processes.discovery import Found, RunDirectory, base_directory, discover

DESCRIPTION = """\
List your servers and engines on this machine: model, URL, uptime, memory, processes, and the
processes that use each GPU. The list includes what dead servers left behind: sockets without a
process, and processes without a supervisor.
"""

EXAMPLES = """\
examples:
  tidegate ps
  tidegate ps --json
  tidegate stop 8000          stop the server on port 8000, or remove what it left behind
"""


class ProcessUsage(msgspec.Struct, frozen=True):
    """The age and the memory of a running server."""

    #: Seconds since the supervisor started; None if it is gone.
    age_s: float | None = None
    #: Memory of all its processes together.
    memory_bytes: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON line")


def run(options: argparse.Namespace) -> int:
    found = discover(base_directory())
    usages = {server.name: usage_of(server) for server in found.run_directories}
    if options.json:
        print(msgspec.json.encode(_listed(found, usages)).decode())
    else:
        print(format_found(found, usages))
    return 0


def usage_of(server: RunDirectory) -> ProcessUsage:
    if server.pid is None:
        return ProcessUsage()
    memory = sum(memory_bytes(process.pid) for process in server.processes)
    return ProcessUsage(process_age_s(server.pid), memory)


def _listed(found: Found, usages: dict[str, ProcessUsage]) -> dict[str, Any]:
    """Return the JSON of `found`, with the usage of each server."""
    listed: dict[str, Any] = msgspec.to_builtins(found)
    for server in listed["places"]:
        server |= msgspec.to_builtins(usages[server["name"]])
    return listed


def format_found(found: Found, usages: dict[str, ProcessUsage]) -> str:
    lines = []
    for server in found.run_directories:
        if server.state != "free":
            lines += _format_server(server, usages[server.name])
    for stray in found.strays:
        lines.append(
            f"stray    {stray.name} (pid {stray.pid}) belongs to no server; to end it: "
            f"kill {stray.pid}"
        )
    for name, holders in found.devices.items():
        lines += [f"device   {name}: {holder.description}" for holder in holders]
    return "\n".join(lines) or "no servers are running, and nothing was left behind"


def _format_server(server: RunDirectory, usage: ProcessUsage) -> list[str]:
    kind = "engine" if server.name.startswith("engine-") else "port"
    model = f" {server.model}" if server.is_supervised and server.model else ""
    url = f" at {server.url}" if server.is_supervised and server.url else ""
    pid = f" (pid {server.pid})" if server.pid is not None else ""
    used = "" if usage.age_s is None else f", up {duration(usage.age_s)}"
    used += f", {usage.memory_bytes / (1 << 30):.2f} GiB" if usage.memory_bytes else ""
    lines = [f"{kind:<8} {server.name}: {server.state}{model}{url}{pid}{used}"]
    names = [(each.name.removeprefix(TITLE_PREFIX), each.pid) for each in server.processes]
    lines += [f"         {name} (pid {pid})" for name, pid in names]
    if server.pid is None:
        lines.append(f"         sockets without a process: {', '.join(server.sockets)}")
    return lines


def duration(seconds: float) -> str:
    """Return a time as text in its two largest units that are not 0: "3 d 4 h", "5 min 2 s", "7
    s"."""
    left, parts = int(seconds), []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2]) or "0 s"
