"""`tidegate status`: one look at a running server, through the engine's own socket.

It asks the engine, not the gateway, so it still answers when HTTP is down, and says that it is. Of
a server with engines of two kinds, which may be elsewhere, only the gateway knows which they are.
"""

from __future__ import annotations

import argparse
import time
from http import HTTPStatus
from typing import Any

import msgspec

from protocol.client import Engine
from protocol.config import GatewayConfig
from protocol.errors import EngineNotReady
from protocol.sockets import engine_address, run_directory
from protocol.stats import EngineStats
from tools.failure import Failure
from tools.flags import flags_of
from tools.run_lock import holder
from tools.web import Server, local_url

WAIT_S = 3.0
LOOK_EVERY_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options = {flag.field: flag for flag in flags_of(GatewayConfig)}
    for field in ("host", "port"):
        flag = options[field]
        parser.add_argument(
            flag.name, default=flag.default, type=flag.read, metavar=flag.metavar, help=flag.help
        )


def run(options: argparse.Namespace) -> int:
    """Exit code 0 if the server and all its engines are ready, 1 if not. Raises Failure where there
    is none."""
    pid = holder(run_directory(options.port))
    if pid is None:
        raise Failure(f"no server runs on port {options.port}; start one: tidegate serve")
    answer = Server(local_url(options.host, options.port)).get("/readyz", timeout_s=WAIT_S)
    status, body = answer or (None, b"")
    print(f"server   pid {pid}")
    print(f"http     {_http(status)}")
    is_ready = status == HTTPStatus.OK
    several = _several(body)
    if several:
        print("\n".join(_one_of_several(role, state) for role, state in several))
        return 0 if is_ready and all(state["ready"] for _, state in several) else 1
    try:
        with Engine(engine_address(options.port), name="status", wait_s=WAIT_S) as engine:
            print(_engine(engine, _stats(engine)))
    except EngineNotReady as error:
        print(f"engine   not ready: {error}")
        return 1
    return 0 if is_ready else 1


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


def _stats(engine: Engine) -> EngineStats:
    """The first heartbeat's; before it, all is zero, which no engine with a cache can be."""
    give_up = time.monotonic() + WAIT_S
    while engine.stats.total_blocks == 0 and time.monotonic() < give_up:
        time.sleep(LOOK_EVERY_S)
    return engine.stats


def _http(status: int | None) -> str:
    if status is None:
        return "does not answer"
    return "ready" if status == HTTPStatus.OK else f"not ready (status {status})"


def _engine(engine: Engine, stats: EngineStats) -> str:
    used = stats.total_blocks - stats.free_blocks
    return f"""\
model    {engine.model.name} ({engine.model.architecture}, {engine.model.dtype})
running  {stats.running} of {engine.limits.max_slots}
waiting  {stats.waiting} ({stats.waiting_tokens} tokens)
blocks   {used} of {stats.total_blocks} hold tokens ({engine.limits.block_tokens} tokens each)
clients  {stats.clients}"""
