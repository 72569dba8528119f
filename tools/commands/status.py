"""`tidegate status`: shows the state of a running server.

The command connects to the engine's socket, so it works when HTTP is down, and reports that HTTP is
down. If a server has separate prefill and decode engines, the command instead reads their state
from the gateway's /readyz, because they may run on other hosts.
"""

from __future__ import annotations

import argparse
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec.structs import replace

from protocol.engine.messages import Limits
from protocol.engine.stats import EngineStats
from protocol.sdk.client import Client
from protocol.wire.errors import EngineError
from protocol.wire.sockets import engine_address
from tools.http.web import ENGINE_ROLES, WebServer, engine_states
from tools.processes.discovery import RunningServer, add_server, local_server
from tools.terminal import memory_size

DESCRIPTION = """\
Show whether a server is ready and how busy it is. The exit code is 0 if the server and all its
engines are ready, and 1 if not.
"""

EXAMPLES = """\
examples:
  tidegate status                 your only server on this machine
  tidegate status --port 8001     the server on this port
  tidegate status --json          one JSON line, for programs
"""

WAIT_S = 3.0


WITHOUT_ENGINE = ("unloaded", "waiting", "failed")
"""States of a model of several in which its engine does not run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser, takes_argument=True)
    parser.add_argument("--json", action="store_true", help="print one JSON line")


def run(options: argparse.Namespace) -> int:
    """Print the status. Return 1 if the server is not ready. Raises Failure if no server runs."""
    server = local_server(options)
    answer = WebServer(server.url).get("/readyz", timeout_s=WAIT_S)
    http_status, body = answer or (None, b"")
    status = _get_status(server, http_status, body)
    print(msgspec.json.encode(status).decode() if options.json else _format(status))
    return 0 if status.ready else 1


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a server. `--json` prints these fields."""

    #: Process id of the supervisor.
    pid: int
    #: URL of the gateways.
    url: str
    #: Whether the server and all its engines are ready.
    ready: bool
    #: HTTP status of /readyz; None if there is no answer.
    http: int | None
    #: The role of each engine and its state in /readyz, if the server has separate engines.
    engines: list[tuple[str, dict[str, Any]]] = []
    #: Why the engine cannot be reached; None if it can, or if the server has separate engines.
    why: str | None = None
    #: Name of the engine's model. This and all later fields are None if no engine was reached.
    model: str | None = None
    #: Architecture of the model, as in its card.
    architecture: str | None = None
    #: Number type of the weights and K/V.
    dtype: str | None = None
    #: The limits that the engine announces.
    limits: Limits | None = None
    #: The statistics that the engine reports.
    stats: EngineStats | None = None


def _get_status(server: RunningServer, http: int | None, body: bytes) -> ServerStatus:
    is_ready = http == HTTPStatus.OK
    status = ServerStatus(pid=server.pid, url=server.url, ready=is_ready, http=http)
    if several := engine_states(body):
        ready = [state["ready"] for role, state in several if role in ENGINE_ROLES]
        is_ready = is_ready and all(ready)  # models may be unloaded
        return replace(status, ready=is_ready, engines=several)
    try:
        with Client(engine_address(server.port), name="status", wait_s=WAIT_S) as engine:
            return replace(
                status,
                model=engine.model.name,
                architecture=engine.model.architecture,
                dtype=engine.model.dtype,
                limits=engine.limits,
                stats=engine.get_status(0).stats,
            )
    except EngineError as error:
        return replace(status, ready=False, why=str(error))


def _format(status: ServerStatus) -> str:
    lines = [f"server   {status.url} (pid {status.pid})", f"http     {_http(status.http)}"]
    lines += [describe_engine(role, state) for role, state in status.engines]
    if status.why is not None:
        lines.append(f"engine   not ready: {status.why}")
    if status.stats is not None and status.limits is not None:
        lines.append(_engine(status, status.limits, status.stats))
    return "\n".join(lines)


def describe_engine(role: str, state: dict[str, Any]) -> str:
    """Return a line about one of several engines, from its state in /readyz."""
    if state.get("state") in WITHOUT_ENGINE:
        return f"{role:<8} {state['state']}"
    if not state["ready"]:
        return f"{role:<8} {state['address']}: not ready: {state['why']}"
    if state["total_blocks"] is None:
        return f"{role:<8} {state['address']}: ready"
    used = state["total_blocks"] - state["free_blocks"]
    checkpoints = ""
    if total := state.get("total_checkpoints"):
        checkpoints = f", {state['used_checkpoints']} of {total} checkpoints"
    return (
        f"{role:<8} {state['address']}: {state['running']} running, "
        f"{state['waiting']} waiting ({state['waiting_tokens']} tokens), "
        f"{used} of {state['total_blocks']} blocks{checkpoints} in use"
    )


def _http(status: int | None) -> str:
    if status is None:
        return "no answer"
    return "ready" if status == HTTPStatus.OK else f"not ready (status {status})"


def _engine(status: ServerStatus, limits: Limits, stats: EngineStats) -> str:
    used = stats.total_blocks - stats.free_blocks
    states = f"\nstates   {_states(limits, stats)}" if limits.state_bytes else ""
    draining = "\nengine   draining: new requests are refused" if stats.draining else ""
    return f"""\
model    {status.model} ({status.architecture}, {status.dtype})
running  {stats.running} of {limits.max_slots}
waiting  {stats.waiting} ({stats.waiting_tokens} tokens)
blocks   {used} of {stats.total_blocks} in use ({limits.block_tokens} tokens each){states}
clients  {stats.clients}{draining}"""


def _states(limits: Limits, stats: EngineStats) -> str:
    """Return a phrase about the memory of recurrent states, and about their checkpoints."""
    used = memory_size(sum(stats.state_bytes.values()))
    text = f"{used} of {memory_size(stats.reserved_state_bytes)} in use"
    text += f" ({memory_size(limits.state_bytes)} each); "
    if not stats.total_checkpoints:
        return text + "no checkpoints, so each prompt is computed"
    text += f"{stats.held_checkpoints + stats.cached_checkpoints} of {stats.total_checkpoints} "
    text += f"checkpoints, {stats.held_checkpoints} of them held by requests"
    if stats.num_uncovered_tokens:
        text += f"; {stats.num_uncovered_tokens} cached prompt tokens were computed again"
    return text
