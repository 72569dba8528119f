"""`tidegate status`: one look at a running server, through the engine's own socket.

It asks the engine, not the gateway, so it still answers when HTTP is down, and says that it is. Of
a server with engines of two kinds, which may be elsewhere, only the gateway knows which they are.
"""

from __future__ import annotations

import argparse
from http import HTTPStatus
from typing import Any

import msgspec

from protocol.client import Engine
from protocol.errors import EngineError
from protocol.messages import Limits
from protocol.sockets import engine_address
from protocol.stats import EngineStats
from tools.http.web import WebServer
from tools.processes.servers import RunningServer, add_server, local_server

DESCRIPTION = "Show whether a server is ready and what it does."

EXAMPLES = """\
examples:
  tidegate status                 of the only server that runs here
  tidegate status --port 8001     of the server on this port
  tidegate status --json          the same, for programs
"""

WAIT_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    parser.add_argument("--json", action="store_true", help="print it as one JSON line")


def run(options: argparse.Namespace) -> int:
    """Exit code 0 if the server and all its engines are ready, 1 if not. Raises Failure where there
    is none."""
    server = local_server(options)
    answer = WebServer(server.url).get("/readyz", timeout_s=WAIT_S)
    status, body = answer or (None, b"")
    looked = _look(server, status, body)
    print(msgspec.json.encode(looked).decode() if options.json else _told(looked))
    return 0 if looked.ready else 1


class Looked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one look has found; `--json` prints it.

    http      status of /readyz; None: it does not answer
    engines   of a server that has several: role, and what /readyz says of each
    why       the engine cannot be asked
    """

    pid: int
    url: str
    ready: bool
    http: int | None
    engines: list[tuple[str, dict[str, Any]]] = []
    why: str | None = None
    model: str | None = None
    architecture: str | None = None
    dtype: str | None = None
    limits: Limits | None = None
    stats: EngineStats | None = None


def _look(server: RunningServer, http: int | None, body: bytes) -> Looked:
    pid, address = server.pid, engine_address(server.port)
    is_ready = http == HTTPStatus.OK
    if several := _several(body):
        is_ready = is_ready and all(state["ready"] for _, state in several)
        return Looked(pid=pid, url=server.url, ready=is_ready, http=http, engines=several)
    try:
        with Engine(address, name="status", wait_s=WAIT_S) as engine:
            return Looked(
                pid=pid,
                url=server.url,
                ready=is_ready,
                http=http,
                model=engine.model.name,
                architecture=engine.model.architecture,
                dtype=engine.model.dtype,
                limits=engine.limits,
                stats=engine.look(0).stats,
            )
    except EngineError as error:
        return Looked(pid=pid, url=server.url, ready=False, http=http, why=str(error))


def _told(looked: Looked) -> str:
    lines = [f"server   {looked.url} (pid {looked.pid})", f"http     {_http(looked.http)}"]
    lines += [_one_of_several(role, state) for role, state in looked.engines]
    if looked.why is not None:
        lines.append(f"engine   not ready: {looked.why}")
    if looked.stats is not None and looked.limits is not None:
        lines.append(_engine(looked, looked.limits, looked.stats))
    return "\n".join(lines)


def _several(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(role, state) of each engine of a server that has several; see /readyz."""
    facts = msgspec.json.decode(body) if body else {}
    return [(role, state) for role in ("prefill", "decode") for state in facts.get(role, [])]


def _one_of_several(role: str, state: dict[str, Any]) -> str:
    if not state["ready"]:
        return f"{role:<8} {state['address']}: not ready: {state['why']}"
    if state["total_blocks"] is None:
        return f"{role:<8} {state['address']}: ready"
    used = state["total_blocks"] - state["free_blocks"]
    return (
        f"{role:<8} {state['address']}: {state['running']} running, "
        f"{state['waiting']} waiting ({state['waiting_tokens']} tokens), "
        f"{used} of {state['total_blocks']} blocks hold tokens"
    )


def _http(status: int | None) -> str:
    if status is None:
        return "does not answer"
    return "ready" if status == HTTPStatus.OK else f"not ready (status {status})"


def _engine(looked: Looked, limits: Limits, stats: EngineStats) -> str:
    used = stats.total_blocks - stats.free_blocks
    draining = "\nengine   draining: it takes nothing new" if stats.draining else ""
    return f"""\
model    {looked.model} ({looked.architecture}, {looked.dtype})
running  {stats.running} of {limits.max_slots}
waiting  {stats.waiting} ({stats.waiting_tokens} tokens)
blocks   {used} of {stats.total_blocks} hold tokens ({limits.block_tokens} tokens each)
clients  {stats.clients}{draining}"""
