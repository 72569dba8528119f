"""A supervisor with small children, run as a program by the tests.

Its argument is JSON: {"port": int, "commands": [[name, python source], ...]}, and optionally
"start_timeout_s", "drain_s", "survivors_s", "max_restarts" and "log_format". The first command is
supervised as a gateway.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from tools.http.web import WebServer
from tools.processes.children import Command
from tools.processes.watch import supervise
from tools.terminal import Terminal

say = partial(print, flush=True)


def main() -> int:
    wanted = json.loads(sys.argv[1])
    return supervise(
        [
            Command(
                name,
                [sys.executable, "-P", "-c", code],
                restarts_children=number == 0,
                log_format=wanted.get("log_format", "text"),
                survivors_s=(number == 0) * wanted.get("survivors_s", 0.0),
            )
            for number, (name, code) in enumerate(wanted["commands"])
        ],
        WebServer(f"http://127.0.0.1:{wanted['port']}"),
        Terminal(wanted.get("log_format", "text")),
        start_timeout_s=wanted.get("start_timeout_s", 30.0),
        drain_s=wanted.get("drain_s", 30.0),
        max_restarts=wanted.get("max_restarts", 0),
        on_started=lambda children: say("started", *(child.pid for child in children)),
        on_listening=lambda: say("listening"),
        on_ready=lambda model: say(f"ready {model}"),
    )


if __name__ == "__main__":
    sys.exit(main())
