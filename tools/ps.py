"""`tidegate ps`: the servers of this user on this machine, and what was left behind."""

from __future__ import annotations

import argparse

import msgspec

from tools.places import Found, Place, base_directory, look

DESCRIPTION = """\
List the servers and engines of this user on this machine with their processes, who has which GPU,
and what others have left behind: sockets that nobody answers, processes whose supervisor is gone.
"""

EXAMPLES = """\
examples:
  tidegate ps
  tidegate ps --json
  tidegate stop 8000          what to do about it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as one JSON line")


def run(options: argparse.Namespace) -> int:
    found = look(base_directory())
    print(msgspec.json.encode(found).decode() if options.json else told(found))
    return 0


def told(found: Found) -> str:
    lines = [line for place in found.places if place.state != "free" for line in _place(place)]
    for stray in found.strays:
        lines.append(f"stray    {stray.name} (pid {stray.pid}), of no server: kill {stray.pid}")
    for name, holders in found.devices.items():
        lines += [f"device   {name}: {holder.told}" for holder in holders]
    return "\n".join(lines) or "nothing runs, and nothing was left behind"


def _place(place: Place) -> list[str]:
    what = "engine" if place.name.startswith("engine-") else "port"
    who = f" (pid {place.pid})" if place.pid is not None else ""
    lines = [f"{what:<8} {place.name}: {place.state}{who}"]
    lines += [f"         {each.name} (pid {each.pid})" for each in place.processes]
    if place.pid is None:
        lines.append(f"         sockets without anybody behind them: {', '.join(place.sockets)}")
    return lines
