"""Selects a server by `--port` or `--url`, or the only one that runs on this machine.

A server writes its URL and its model into its lock (run_lock.py). So a tool finds both in the run
directory, on whichever host the server listens.
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
    """A server of this user on this machine."""

    port: int
    #: Process id of the supervisor.
    pid: int
    url: str
    #: Name of the model; "" until it is known.
    model: str

    def __str__(self) -> str:
        return f"{self.port} ({self.model})" if self.model else str(self.port)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add --port and --url. Without both, a command uses the only server on this machine."""
    (port,) = (flag for flag in flags_of(GatewayConfig) if flag.field == "port")
    parser.add_argument(
        port.name,
        type=port.read,
        metavar=port.metavar,
        help="use the server on this port (default: your only server on this machine)",
    )
    parser.add_argument("--url", metavar="URL", help="use the server at this URL")


def running(base: Path | None = None) -> list[RunningServer]:
    """Return the servers that hold a run directory, sorted by port."""
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
    """Return the running server that the options select.

    Raises Failure if there is none, or if several run and the options select none of them.

    otherwise   advice for the error message if no server runs
    """
    servers = running()
    found = _named(options, servers)
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(map(str, found))
        raise Failure(
            f"{len(found)} servers are running: {listed}; select one with --port", exit_code=2
        )
    if options.url:
        raise Failure(f"none of your servers on this machine has the URL {options.url}")
    where = "" if options.port is None else f" on port {options.port}"
    advice = f"running: {', '.join(map(str, servers))}" if servers else otherwise
    raise Failure(f"no server is running{where}; {advice}")


def server_url(options: argparse.Namespace) -> str:
    """Return the URL of the server that the options select, which may be any server.

    Without options, and if this user runs no server, return the default port on this machine.
    """
    if options.url:
        _named(options, [])
        return str(options.url)
    found = _named(options, running())
    if len(found) > 1:
        return local_server(options).url
    port = DEFAULT_PORT if options.port is None else options.port
    return found[0].url if found else local_url("127.0.0.1", port)


def _named(options: argparse.Namespace, servers: list[RunningServer]) -> list[RunningServer]:
    """Return those of `servers` that match the options."""
    if options.url and options.port is not None:
        raise Failure("give only one of --port and --url", exit_code=2)
    if options.url:
        address = _host_and_port(options.url)
        return [server for server in servers if _host_and_port(server.url) == address]
    return [server for server in servers if options.port in (None, server.port)]


def _host_and_port(url: str) -> tuple[str, int | None]:
    """Return the host and port of a URL. All loopback names count as one host."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise Failure(
            f"--url {url!r}: the port must be a number from 0 to 65535", exit_code=2
        ) from None
    return "loopback" if is_loopback(host) else host, port
