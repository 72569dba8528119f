"""How a command names a server: `--port`, `--url`, or neither if only one runs here.

A server writes its URL and its model into its lock (run_lock.py), so a tool finds both by the run
directory, whatever host the server listens on.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from protocol.config.gateway import GatewayConfig
from protocol.hosts import is_loopback
from protocol.sockets import run_directory
from tools.failure import Failure
from tools.flags import flags_of
from tools.http.web import local_url
from tools.processes import run_lock

START_ONE = "start one: tidegate serve"
DEFAULT_PORT = GatewayConfig().port


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server of this user on this machine.

    pid    of its supervisor
    model  the name of what it serves; "" if it has not said so yet
    """

    port: int
    pid: int
    url: str
    model: str

    def __str__(self) -> str:
        return f"{self.port} ({self.model})" if self.model else str(self.port)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add --port and --url. Without both, a command means the only server that runs here."""
    (port,) = (flag for flag in flags_of(GatewayConfig) if flag.field == "port")
    parser.add_argument(
        port.name,
        type=port.read,
        metavar=port.metavar,
        help="use the server on this port; default: your only server on this machine",
    )
    parser.add_argument("--url", metavar="URL", help="use the server at this URL")


def running(base: Path | None = None) -> list[RunningServer]:
    """Return the servers that hold a run directory, by port."""
    base = base or run_directory(0).parent
    found = []
    for directory in base.iterdir() if base.is_dir() else []:
        if not directory.name.isdecimal():
            continue
        pid = run_lock.holder(directory)
        if pid is not None:
            port, facts = int(directory.name), run_lock.facts(directory)
            url = facts.url or local_url("127.0.0.1", port)
            found.append(RunningServer(port, pid, url, facts.model))
    return sorted(found, key=lambda server: server.port)


def local_server(options: argparse.Namespace, *, otherwise: str = START_ONE) -> RunningServer:
    """Return the running server that the options name. Raise Failure if there is none, or if
    several run and none is named. `otherwise` says what to do if none runs."""
    servers = running()
    found = _named(options, servers)
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(map(str, found))
        raise Failure(f"{len(found)} servers run here: {listed}; choose with --port", exit_code=2)
    if options.url:
        raise Failure(f"no server of yours on this machine is at {options.url}")
    where = "here" if options.port is None else f"on port {options.port}"
    here = f"running: {', '.join(map(str, servers))}" if servers else otherwise
    raise Failure(f"no server runs {where}; {here}")


def server_url(options: argparse.Namespace) -> str:
    """Return the URL of the server that the options name, which may be anybody's: without options
    and without a server of this user, the default port is meant."""
    if options.url:
        _named(options, [])
        return str(options.url)
    found = _named(options, running())
    if len(found) > 1:
        return local_server(options).url
    port = DEFAULT_PORT if options.port is None else options.port
    return found[0].url if found else local_url("127.0.0.1", port)


def _named(options: argparse.Namespace, servers: list[RunningServer]) -> list[RunningServer]:
    """Return those of `servers` that the options can mean."""
    if options.url and options.port is not None:
        raise Failure("--port and --url both name a server: give one of them", exit_code=2)
    if options.url:
        wanted = _place(options.url)
        return [server for server in servers if _place(server.url) == wanted]
    return [server for server in servers if options.port in (None, server.port)]


def _place(url: str) -> tuple[str, int | None]:
    """Return the host and port of a URL; all names of this machine's loopback are one host."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise Failure(
            f"--url {url!r}: the port must be a number from 0 to 65535", exit_code=2
        ) from None
    return "loopback" if is_loopback(host) else host, port
