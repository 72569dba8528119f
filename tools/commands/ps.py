"""`tidegate ps`: the servers of this user on this machine, and what was left behind."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from protocol.process_state import age_s_of, memory_of
from tools.processes.server_discovery import Found, RunDirectory, base_directory, look

DESCRIPTION = """\
List the servers and engines of this user on this machine: model, URL, time since the start, memory,
processes, who has which GPU, and what others have left behind: sockets that nobody answers,
processes whose supervisor is gone.
"""

EXAMPLES = """\
examples:
  tidegate ps
  tidegate ps --json
  tidegate stop 8000          what to do about it
"""


class ProcessUsage(msgspec.Struct, frozen=True):
    """A server's age and memory: seconds since its supervisor began, and the bytes of all its
    processes."""

    age_s: float | None = None
    memory_bytes: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as one JSON line")


def run(options: argparse.Namespace) -> int:
    found = look(base_directory())
    usages = {place.name: usage_of(place) for place in found.places}
    if options.json:
        print(msgspec.json.encode(_listed(found, usages)).decode())
    else:
        print(told(found, usages))
    return 0


def usage_of(place: RunDirectory) -> ProcessUsage:
    if place.pid is None:
        return ProcessUsage()
    memory = sum(memory_of(process.pid) for process in place.processes)
    return ProcessUsage(age_s_of(place.pid), memory)


def _listed(found: Found, usages: dict[str, ProcessUsage]) -> dict[str, Any]:
    """Return `found` as JSON, each place with its usage."""
    listed: dict[str, Any] = msgspec.to_builtins(found)
    for place in listed["places"]:
        place |= msgspec.to_builtins(usages[place["name"]])
    return listed


def told(found: Found, usages: dict[str, ProcessUsage]) -> str:
    lines = []
    for place in found.places:
        if place.state != "free":
            lines += _place(place, usages[place.name])
    for stray in found.strays:
        lines.append(f"stray    {stray.name} (pid {stray.pid}), of no server: kill {stray.pid}")
    for name, holders in found.devices.items():
        lines += [f"device   {name}: {holder.told}" for holder in holders]
    return "\n".join(lines) or "nothing runs, and nothing was left behind"


def _place(place: RunDirectory, usage: ProcessUsage) -> list[str]:
    what = "engine" if place.name.startswith("engine-") else "port"
    serves = f" {place.model}" if place.leads and place.model else ""
    where = f" at {place.url}" if place.leads and place.url else ""
    who = f" (pid {place.pid})" if place.pid is not None else ""
    takes = "" if usage.age_s is None else f", up {duration(usage.age_s)}"
    takes += f", {usage.memory_bytes / (1 << 30):.2f} GiB" if usage.memory_bytes else ""
    lines = [f"{what:<8} {place.name}: {place.state}{serves}{where}{who}{takes}"]
    lines += [f"         {each.name} (pid {each.pid})" for each in place.processes]
    if place.pid is None:
        lines.append(f"         sockets without anybody behind them: {', '.join(place.sockets)}")
    return lines


def duration(seconds: float) -> str:
    """Return a time span in its two largest units: "3 d 4 h", "5 min 2 s", "7 s"."""
    left, parts = int(seconds), []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2]) or "0 s"
