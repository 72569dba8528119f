"""Finds this user's servers, and connects a command to the one that its options select.

The processes of a server inherit the lock of its run directory (run_lock.py), so they can be found
even if the supervisor is gone. Their descendants belong to the server, too. A server writes its URL
and the name of its model into the lock file, so a tool finds both, whatever address the server
listens on. `clear` is the only function here that changes anything.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from protocol.config.gateway import GatewayConfig
from protocol.process import devices
from protocol.process.devices import DeviceHolder
from protocol.process.process_state import (
    PROC,
    TITLE_PREFIX,
    ZOMBIE,
    program_name,
    read_stat,
    with_descendants,
)
from protocol.sdk.client import Client
from protocol.wire.errors import EngineNotReady
from protocol.wire.loopback import is_loopback
from protocol.wire.sockets import engine_address, run_directory
from tools.failure import Failure
from tools.flags import flags_of, let_stand_for
from tools.http.web import ENGINE_ROLES, WebServer, engine_states, local_url, port_of
from tools.processes import run_lock

START_ONE = "start one: tidegate serve"
DEFAULT_PORT = GatewayConfig().port
CONNECT_TIMEOUT_S = 3.0
OUR_PROGRAMS = ("engine_core", "worker")
"""Names of engines and workers before they have set their titles."""
OUR_TITLES = (f"{TITLE_PREFIX}engine", f"{TITLE_PREFIX}worker")
"""Start of their titles: an engine's number, model and role may follow."""
INIT = 1
"""Pid of the process that adopts processes whose parent is gone."""


class RunningProcess(msgspec.Struct, frozen=True):
    """A process of this user. `pid` and `started` together identify it."""

    pid: int
    parent: int
    #: Clock ticks between the boot and the start of the process.
    started: int
    name: str


class RunDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """A run directory, and the server or single engine that holds it, if any."""

    #: Name of the directory: the HTTP port of a server, or "engine-..." for a single engine.
    name: str
    #: URL of the server, or address of the engine; "" until it is known.
    url: str = ""
    #: Name of the model; "" until it is known.
    model: str = ""
    #: Process id of the supervisor; None if no process holds the directory.
    pid: int | None
    #: Whether the supervisor still runs.
    is_supervised: bool = msgspec.field(name="leads")
    #: All processes of the server.
    processes: list[RunningProcess]
    #: Names of the sockets in the directory.
    sockets: list[str]

    @property
    def state(self) -> str:
        if self.pid is None:
            return "left behind" if self.sockets else "free"
        return "serves" if self.is_supervised else "lost its supervisor"


class Found(msgspec.Struct, frozen=True):
    """The servers of this user on this machine. `tidegate ps --json` prints these fields."""

    run_directories: list[RunDirectory] = msgspec.field(name="places")
    #: Engines and workers that belong to no run directory, and whose parent is gone.
    strays: list[RunningProcess]
    #: Name of a device -> the processes that use it.
    devices: dict[str, list[DeviceHolder]] = {}


def base_directory() -> Path:
    return run_directory(0).parent


def discover(base: Path, proc: Path = PROC) -> Found:
    """Return this user's servers, stray processes and used devices.

    base   parent of the run directories. Directories left behind by dead servers are included
    """
    running = processes(proc)
    parents = {process.pid: process.parent for process in running.values()}
    run_directories = []
    for directory in run_lock.run_directories(base):
        # A server that ends meanwhile removes its run directory.
        with contextlib.suppress(FileNotFoundError):
            heads = _holding(directory / run_lock.LOCK, running, proc)
            own = with_descendants(heads, parents) - {os.getpid()}
            pid = run_lock.holder(directory)
            facts = run_lock.LockFacts() if pid is None else run_lock.facts(directory)
            run_directories.append(
                RunDirectory(
                    name=directory.name,
                    url=facts.url,
                    model=facts.model,
                    pid=pid,
                    is_supervised=pid in running,
                    processes=[] if pid is None else [running[each] for each in sorted(own)],
                    sockets=sorted(path.name for path in directory.iterdir() if path.is_socket()),
                )
            )
    known = {each.pid for server in run_directories for each in server.processes}
    orphans = (
        each
        for each in running.values()
        if each.parent == INIT and (each.name in OUR_PROGRAMS or each.name.startswith(OUR_TITLES))
    )
    strays = [each for each in orphans if each.pid not in known]
    return Found(run_directories, strays, devices.holders_by_device(devices.directory(base)))


def processes(proc: Path = PROC) -> dict[int, RunningProcess]:
    """Return the processes of this user by pid, except zombies."""
    found = {}
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            pid = int(folder.name)
            stat = read_stat(pid, proc)
            if stat is not None and stat.state != ZOMBIE:
                found[pid] = RunningProcess(pid, stat.parent, stat.started, program_name(pid, proc))
    return found


def _holding(lock: Path, running: Mapping[int, RunningProcess], proc: Path) -> Iterator[int]:
    """Yield the pids of the processes that have the file `lock` open."""
    info = lock.stat()
    for pid in running:
        with contextlib.suppress(OSError):
            for descriptor in (proc / str(pid) / "fd").iterdir():
                if os.readlink(descriptor) != str(lock):
                    continue
                opened = descriptor.stat()
                if (opened.st_dev, opened.st_ino) == (info.st_dev, info.st_ino):
                    yield pid
                    break


def clear(directory: Path) -> list[str]:
    """Remove a run directory, unless a process holds it. Return the names of the removed files. The
    directory's lock is held meanwhile, so a server that is just starting is not affected."""
    if not directory.is_dir():
        return []
    try:
        lock = run_lock.hold(directory)
    except Failure:
        return []  # a server has just started
    try:
        return run_lock.remove(directory)
    finally:
        os.close(lock)


# ---- the server that a command's options select


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


def add_server(
    parser: argparse.ArgumentParser, *, takes_argument: bool = False, otherwise: str = ""
) -> None:
    """Add the options --port and --url, which select a server.

    takes_argument   the port may also be given without --port, as the last argument
    otherwise        advice for a user whose argument is neither a number nor a URL, with {} for it
    """
    (port,) = (flag for flag in flags_of(GatewayConfig) if flag.field == "port")

    def read(text: str) -> int:
        try:
            number: int = port.read(text)
        except argparse.ArgumentTypeError as error:
            if "://" in text:
                raise argparse.ArgumentTypeError(f"{error}; an address: --url {text}") from None
            hint = f"; {otherwise.format(text)}" if otherwise and not text.isdecimal() else ""
            raise argparse.ArgumentTypeError(f"{error}{hint}") from None
        return number

    if takes_argument:
        parser.add_argument(
            "port_argument", nargs="?", metavar="PORT", help="the same as --port PORT"
        )
        let_stand_for(parser, "port_argument", "port", read)
    parser.add_argument(
        port.name,
        type=port.read,
        metavar="PORT",
        help="use the server on this port (default: your only server on this machine)",
    )
    parser.add_argument("--url", metavar="URL", help="use the server at this URL")


def running(base: Path | None = None) -> list[RunningServer]:
    """Return this user's running servers, sorted by port."""
    base = base or base_directory()
    found = []
    for directory in run_lock.run_directories(base):
        if not directory.name.isdecimal():
            continue
        pid = run_lock.holder(directory)
        if pid is not None:
            port, facts = int(directory.name), run_lock.facts(directory)
            url = facts.url or local_url("127.0.0.1", port)
            found.append(RunningServer(port, pid, url, facts.model))
    return sorted(found, key=lambda server: server.port)


def local_server(options: argparse.Namespace, *, otherwise: str = START_ONE) -> RunningServer:
    """Return the running server that the options select; without options, the only one.

    otherwise   advice for the error message if no server runs

    Raises Failure if there is none, or if the options do not select one of several.
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
    """Return the URL of the server that the options select. --url may name any server. If no server
    is found, return the URL of --port, or else of the default port, on this machine.

    Raises Failure if the options do not select one of several servers.
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
    """Return those of `servers` that the options select; all of them without options. Raises
    Failure if both options are given."""
    if options.url and options.port is not None:
        raise Failure("give only one of --port and --url", exit_code=2)
    if options.url:
        address = _host_and_port(options.url)
        return [server for server in servers if _host_and_port(server.url) == address]
    return [server for server in servers if options.port in (None, server.port)]


def _host_and_port(url: str) -> tuple[str, int | None]:
    """Return the host and port of a URL. All loopback addresses count as the same host."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    host = parts.hostname or ""
    return "loopback" if is_loopback(host) else host, port_of(parts, url)


def add_engine_options(parser: argparse.ArgumentParser, *, takes_argument: bool = False) -> None:
    """Add the options --port, --url, --model, --engine and --cluster-key, which select an engine.
    `takes_argument` is that of `add_server`."""
    add_server(parser, takes_argument=takes_argument)
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="use the engine of this model, if the server has several (default: the first)",
    )
    parser.add_argument(
        "--engine",
        metavar="ADDRESS",
        help="use the engine at this address (ipc://PATH or tcp://HOST:PORT) instead of a server",
    )
    parser.add_argument(
        "--cluster-key", default="", metavar="FILE", help="cluster key file; required for TCP"
    )


def connect(options: argparse.Namespace, name: str) -> Client:
    """Return a client of the engine that the options select. Without --model it does not use HTTP,
    so it works when HTTP is down.

    name   name of the client, which the engine logs

    Raises Failure if the options do not select an engine, or if the engine is not ready.
    """
    address = options.engine or _engine_of_server(local_server(options), options.model)
    try:
        return Client(address, name=name, wait_s=CONNECT_TIMEOUT_S, cluster_key=options.cluster_key)
    except EngineNotReady as error:
        raise Failure(f"the engine is not ready: {error}") from None
    except ValueError as error:
        raise Failure(str(error), exit_code=2) from None


def _engine_of_server(server: RunningServer, model: str | None) -> str:
    """Return the address of the engine of `model`, or with None of the server's first engine.
    Raises Failure if the server has no such model."""
    if model is None:
        return engine_address(server.port)
    answer = WebServer(server.url).get("/readyz")
    states = engine_states(answer[1]) if answer is not None else None
    addresses = {role: state["address"] for role, state in states or [] if role not in ENGINE_ROLES}
    if model not in addresses:
        names = ", ".join(addresses) or "none that --model could choose"
        raise Failure(f"--model {model}: the server's models are {names}", exit_code=2)
    return str(addresses[model])
