"""`tidegate serve`: from the command line to running processes.

    options -> configs -> the run directory's lock -> the model's path -> commands -> the watch loop

What is decided while they run is `tools.supervisor`'s; this file puts the pieces together.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from protocol.config import EngineConfig, GatewayConfig, ServeConfig, WorkerConfig
from protocol.sockets import engine_address, run_directory
from tools import run_lock
from tools.catalogue import CATALOGUE, DEFAULT
from tools.children import Child, Command, last_words
from tools.failure import Failure
from tools.fetch import home
from tools.flags import add_flags, build
from tools.models import resolve
from tools.watch import say, supervise
from tools.web import Server, local_url

DESCRIPTION = """\
Serve a model over the OpenAI API (HTTP) and over ZeroMQ. Ctrl-C stops the server after open
requests have finished; pressed twice, at once.
"""

EXAMPLES = f"""\
examples:
  tidegate serve                                  the default model, {DEFAULT}, on port 8000
  tidegate serve ~/models/qwen3-4b                a Hugging Face directory (safetensors)
  tidegate serve model.gguf --port 8001           a GGUF file, on another port
  tidegate serve --max-len 4096 --max-slots 16    less memory: shorter and fewer requests
  tidegate serve --served-name small --gateways 2
  tidegate serve --render-only DIRECTORY          no engine: render, derender, tokenize
"""

ROOMS = (
    ("the gateway", GatewayConfig),
    ("the engine", EngineConfig),
    ("the worker", WorkerConfig),
    ("the supervisor", ServeConfig),
)
NEEDED = {"gunicorn": "gateway", "flask": "gateway", "gevent": "gateway", "torch": "worker"}
"""Libraries that a child would miss at once -> the extra that brings them."""
COMPUTES = frozenset({"torch"})
"""Those that only a server with an engine needs."""
CARD_FILE = "model.card"
CARD_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is to be started; nothing of it has happened yet."""

    engine: EngineConfig
    gateway: GatewayConfig
    serve: ServeConfig
    directory: Path

    @property
    def url(self) -> str:
        return local_url(self.gateway.host, self.gateway.port)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT,
        metavar="MODEL",
        help="a Hugging Face directory, a .gguf file, or a name from `tidegate models` "
        f"(default {DEFAULT})",
    )
    for title, config in ROOMS:
        add_flags(parser, config, title=title)


def plan(options: Mapping[str, Any]) -> Plan:
    """The configs that the options make; `worker.model` is still as the user named it.

    Raises Failure, with the exit code of a usage error, where options contradict each other.
    """
    try:
        gateway = build(GatewayConfig, options)
        directory = run_directory(gateway.port)
        address = engine_address(gateway.port)
        worker_address = f"ipc://{directory / 'worker.sock'}"
        worker = build(WorkerConfig, options, model=options["model"], address=worker_address)
        engine = build(EngineConfig, options, worker=worker, address=address)
        serve = build(ServeConfig, options)
    except ValueError as error:
        raise Failure(str(error), exit_code=2) from None
    names = gateway.served_name or ([worker.model] if worker.model in CATALOGUE else [])
    store = gateway.response_store or str(home() / "responses" / f"{gateway.port}.db")
    gateway = msgspec.structs.replace(
        gateway, engine=address, served_name=names, response_store=store
    )
    return Plan(engine, gateway, serve, directory)


def commands(plan: Plan, *, lock: int) -> list[Command]:
    """How to start the children, in the order in which a drain stops them.

    `-P` keeps the working directory out of sys.path, so that a folder of the user's cannot pass for
    one of our rooms. gunicorn puts it back, so the gateway works in the run directory, where only
    sockets are.
    """
    python = [sys.executable, "-P", "-m"]
    conf = f"--config={_folder_of('gateway') / 'gunicorn_conf.py'}"
    engine_json, gateway_json = (
        msgspec.json.encode(c).decode() for c in (plan.engine, plan.gateway)
    )
    gateway = [
        Command(
            "gateway",
            [*python, "gunicorn", conf, "gateway.app:create_app()"],
            environment={"TIDEGATE_GATEWAY": gateway_json},
            directory=plan.directory,
            keeps_open=[lock],
        )
    ]
    if plan.serve.render_only:
        return gateway
    engine = [*python, "engine_core", "--config", engine_json]
    return [*gateway, Command("engine", engine, keeps_open=[lock])]


def run(options: argparse.Namespace) -> int:
    started = time.monotonic()
    wanted = plan(vars(options))
    _check_installation(computes=not wanted.serve.render_only)
    lock = run_lock.hold(wanted.directory)
    try:
        run_lock.check_port_is_free(wanted.gateway.host, wanted.gateway.port)
        return _serve(_with_model_path(wanted), lock, started)
    finally:
        os.close(lock)


def _with_model_path(plan: Plan) -> Plan:
    """The plan with the model's name replaced by its path, fetched if need be."""
    render_only = plan.serve.render_only
    path = resolve(plan.engine.worker.model, home(), text_only=render_only)
    worker = msgspec.structs.replace(plan.engine.worker, model=str(path))
    engine = msgspec.structs.replace(plan.engine, worker=worker)
    gateway = plan.gateway
    if render_only:
        card = _write_card(path, plan.directory / CARD_FILE, worker.max_len)
        gateway = msgspec.structs.replace(gateway, card=str(card))
    return Plan(engine, gateway, plan.serve, plan.directory)


def _write_card(model: Path, file: Path, max_len: int) -> Path:
    """What the gateway has to know of the model, which the worker's room alone can read."""
    command = [sys.executable, "-P", "-m", "worker.card", str(model), str(file)]
    try:
        done = subprocess.run(
            [*command, f"--max-len={max_len}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CARD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"reading {model} took more than {CARD_TIMEOUT_S} s") from None
    if done.returncode:
        raise Failure(last_words(done.stderr.splitlines()) or f"{model} cannot be read")
    return file


def _serve(plan: Plan, lock: int, started: float) -> int:
    def phase(text: str) -> None:
        say(f"{time.monotonic() - started:6.1f} s  {text}")

    def started_all(children: Sequence[Child]) -> None:
        phase(", ".join(f"{child.name} started (pid {child.pid})" for child in children))

    phase(f"model {plan.engine.worker.model}")
    return supervise(
        commands(plan, lock=lock),
        Server(plan.url),
        start_timeout_s=plan.serve.start_timeout_s,
        drain_s=plan.gateway.drain_s,
        on_started=started_all,
        on_listening=lambda: phase(
            "gateway answers" + ("" if plan.serve.render_only else "; the model is loading")
        ),
        on_ready=lambda model: say(_welcome(plan, model, time.monotonic() - started)),
    )


def _welcome(plan: Plan, model: str | None, seconds: float) -> str:
    if plan.serve.render_only:
        return f"""\
{seconds:6.1f} s  ready

Tidegate renders for {model} at {plan.url}, without an engine  (ready in {seconds:.1f} s)

Ctrl-C stops it.
"""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"""\
{seconds:6.1f} s  ready

Tidegate serves {model} at {plan.url}  (ready in {seconds:.1f} s)

  curl {plan.url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{body}'

  tidegate chat --url {plan.url}
  ZeroMQ: {plan.gateway.engine}

Ctrl-C stops it.
"""


def _check_installation(*, computes: bool) -> None:
    for library, extra in NEEDED.items():
        if not computes and library in COMPUTES:
            continue
        if importlib.util.find_spec(library) is None:
            raise Failure(f"{library} is not installed; try: pip install 'tidegate[{extra}]'")


def _folder_of(room: str) -> Path:
    """Where a room lies, without importing it."""
    spec = importlib.util.find_spec(room)
    if spec is None or spec.origin is None:
        raise Failure(f"the {room} package is not installed")
    return Path(spec.origin).parent
