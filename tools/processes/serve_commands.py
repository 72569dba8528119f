"""The commands that start the processes of `tidegate serve`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec

from protocol.config.engine import EngineConfig
from protocol.process.exit_codes import ExitCode
from tools.failure import Failure
from tools.processes.children import Command, module_command
from tools.processes.serve_plan import ServePlan
from tools.processes.supervisor import STOP_S

ENGINE_EXIT_CODES: dict[int, int] = {
    code: code for code in ExitCode if code not in (ExitCode.OK, ExitCode.FAILED)
}
"""Exit code of an engine -> exit code of the server, if the engine's failure ends the server."""
GATEWAY_EXIT_CODES: dict[int, int] = {4: ExitCode.USAGE, ExitCode.BAD_MODEL: ExitCode.BAD_MODEL}
"""Exit code of gunicorn -> exit code of the server, if the failure of the gateways ends the server.
gunicorn exits with 4 if it cannot create the application, for example because of a wrong option."""
REPLICAS = "the engines"
"""The group of the engines of --replicas."""


def engine_commands(plan: ServePlan, lock: int) -> list[Command]:
    group = REPLICAS if plan.serve.replicas > 1 else ""
    groups = list(plan.models) or [group] * len(plan.engines)
    return [
        engine_command(name, each, lock, group=group)
        for group, (name, each) in zip(groups, plan.engines.items(), strict=True)
    ]


def gateway_command(plan: ServePlan, lock: int) -> Command:
    # gunicorn adds the working directory to sys.path. The run directory contains no Python files.
    conf = f"--config={_folder_of('gateway') / 'gunicorn_conf.py'}"
    return Command(
        "gateway",
        module_command("gunicorn", conf, "gateway.app:create_app()"),
        environment=plan.gateway.to_environment(),
        directory=plan.directory,
        keeps_open=[lock],
        exit_code=ExitCode.GATEWAY_LOST,
        exit_codes=GATEWAY_EXIT_CODES,
        restarts_children=True,
        survivors_s=STOP_S,
        log_format=plan.gateway.log_format,
    )


def engine_command(name: str, engine: EngineConfig, lock: int, *, group: str = "") -> Command:
    config = msgspec.json.encode(engine).decode()
    title = name if engine.role == "both" else f"{name} ({engine.role})"
    return Command(
        name,
        module_command("engine_core", "--config", config, "--title", title),
        group=group,
        address=engine.address,
        keeps_open=[lock],
        exit_code=ExitCode.ENGINE_LOST,
        exit_codes=ENGINE_EXIT_CODES,
        log_format=engine.log_format,
    )


def _folder_of(room: str) -> Path:
    """Return the directory of a package without importing it."""
    spec = importlib.util.find_spec(room)
    if spec is None or spec.origin is None:
        raise Failure(f"the {room} package is not installed")
    return Path(spec.origin).parent
