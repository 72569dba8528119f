"""A supervisor with small children, run as a program by the tests.

Its argument is JSON: {"port": int, "commands": [[name, python source], ...]}, and optionally
"start_timeout_s", "drain_s", "survivors_s", "max_restarts", "log_format", and "probe_every_s", the
interval of the probes that no output of a child causes. The first command is supervised as a
gateway. A command may also have a group and an address: [name, source, group, address].
"directory" is the directory of the control socket. "models" are the names of the models that are
not loaded at the start, each with one group of engines; "max_loaded" is their limit.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

from tools.http.web import WebServer
from tools.processes import readiness
from tools.processes.children import Command
from tools.processes.fleet import Fleet, FleetLimits
from tools.processes.watch import supervise
from tools.terminal import Terminal

say = partial(print, flush=True)


def main() -> int:
    wanted = json.loads(sys.argv[1])
    readiness.PROBE_EVERY_S = wanted.get("probe_every_s", readiness.PROBE_EVERY_S)
    models = dict.fromkeys(wanted.get("models", ()), 0)
    limits = FleetLimits(max_loaded=wanted.get("max_loaded", 0))
    directory = wanted.get("directory")
    return supervise(
        [
            Command(
                name,
                [sys.executable, "-P", "-c", code],
                restarts_children=number == 0,
                log_format=wanted.get("log_format", "text"),
                survivors_s=(number == 0) * wanted.get("survivors_s", 0.0),
                group=(rest or [""])[0],
                address=rest[1] if rest else "",
            )
            for number, (name, code, *rest) in enumerate(wanted["commands"])
        ],
        WebServer(f"http://127.0.0.1:{wanted['port']}"),
        Terminal(wanted.get("log_format", "text")),
        start_timeout_s=wanted.get("start_timeout_s", 30.0),
        drain_s=wanted.get("drain_s", 30.0),
        max_restarts=wanted.get("max_restarts", 0),
        replica_restarts=5,
        fleet=Fleet(models, limits, time.monotonic()) if models else None,
        control_directory=Path(directory) if directory else None,
        on_started=lambda children: say("started", *(child.pid for child in children)),
        on_listening=lambda: say("listening"),
        on_ready=lambda model: say(f"ready {model}"),
    )


if __name__ == "__main__":
    sys.exit(main())
